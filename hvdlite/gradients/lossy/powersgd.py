"""`PowerSGD`: sends a matrix of gradients as the product of two thin ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hvdlite.checks import check_count
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.errors import ArgumentError
from hvdlite.gradients.aggregator import FlatBucket, Weights
from hvdlite.gradients.lossy.memory import Errors, ExactSteps, make_unusable
from hvdlite.gradients.same_number import are_equal, checksum, with_square
from hvdlite.protocols import Array, ReduceOp
from hvdlite.tensors.reduction import reduction

_MARK_BITS = 6
"""The bits of a checksum: the sum of their squares must be exact in float32, for thousands of ranks."""


class PowerSGD:
    """Combines gradients by one step of a power iteration (Vogels, Karimireddy and Jaggi, arXiv:1905.13727, algorithm 1).

    The gradient of a parameter is a matrix M with n rows (its first dimension) and m columns (all others). In place of its n m
    elements, r (n + m) travel: the ranks add up P = M Q, make the columns of P orthonormal, and add up Q = Mᵀ P. The result is
    P Qᵀ. The difference is added to this rank's next gradient (`Errors`), and the next step begins with this Q, so that the
    iteration goes on from step to step. Vectors, and matrices for which that saves little, travel whole.

    A rank with samples counts by their number, as in a plain average. All hosts must have equal processors: each rank computes
    P Qᵀ by itself.

    Args:
        rank: The number r of columns. More columns are more bytes, and a better result.
        exact_steps: The number of steps at the beginning in which gradients travel whole.
        least_gain: A matrix is compressed if that makes it smaller by at least this factor.
        seed: The seed of the first Q, the same on all ranks.
        bits: 16 if P and Q travel as bfloat16, in half of the bytes; None if they travel as they are. What the rounding takes
            away is added to the next gradient, too.

    Attributes:
        name: The settings, which must be equal on all ranks.

    Raises:
        ArgumentError: An argument has a value that is not allowed.
    """

    def __init__(
        self, rank: int = 4, *, exact_steps: int = 0, least_gain: float = 2.0, seed: int = 0, bits: int | None = None
    ) -> None:
        check_count("powersgd: rank", rank, "number of columns")
        if bits not in (None, 16):
            raise ArgumentError(
                f"powersgd(bits={bits!r}): expected 16 (P and Q travel as bfloat16), or None (as they are)."
            )
        if exact_steps < 0 or not least_gain >= 1:
            raise ArgumentError(
                f"powersgd(exact_steps={exact_steps}, least_gain={least_gain}): expected exact_steps from 0 on, and least_gain "
                "from 1 on."
            )
        self._rank, self._least_gain, self._seed = rank, least_gain, seed
        self._rounded = reduction("bfloat16", ReduceOp.SUM) if bits else None
        self.name = (
            f"powersgd(rank={rank}, exact_steps={exact_steps}, least_gain={least_gain:g}, seed={seed}, bits={bits})"
        )
        self._steps = ExactSteps("powersgd", exact_steps)
        self._columns: dict[int, Array] = {}
        """Q of each matrix with orthonormal columns, the same on all ranks."""
        self._errors = Errors()

    def __repr__(self) -> str:
        return self.name

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """See `Aggregator`."""
        self._errors.renumber(numbers)
        self._columns = {numbers[number]: part for number, part in self._columns.items() if number in numbers}

    def aggregate(self, bucket: FlatBucket, weights: Weights, collectives: HierarchicalCollectives) -> None:
        """See `Aggregator.aggregate`.

        Raises:
            MismatchError: The ranks go on from different states. Raised on all ranks.
        """
        share = weights.own / weights.total
        is_exact = self._steps.begin(collectives)
        for array in bucket.arrays:
            tensors = {number: view for number, view in bucket.tensors.items() if view.dtype == array.dtype}
            matrices = {number: view.reshape(len(view), -1) for number, view in tensors.items() if self._takes(view)}
            if is_exact or not matrices:
                array *= share
                collectives.allreduce(array, ReduceOp.SUM)
                continue
            vectors = {number: view for number, view in tensors.items() if number not in matrices}
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found in the sum
                self._combine(matrices, vectors, weights.own > 0, share, collectives)

    def _takes(self, view: Array) -> bool:
        if view.ndim < 2 or view.dtype.kind != "f":
            return False
        rows, columns = len(view), view.size // max(1, len(view))
        return self._least_gain * self._rank * (rows + columns) <= rows * columns

    def _combine(
        self,
        matrices: Mapping[int, Array],
        vectors: Mapping[int, Array],
        has_data: bool,
        share: float,
        collectives: HierarchicalCollectives,
    ) -> None:
        """Combine gradients of one dtype, in place.

        Args:
            matrices: The gradients that are compressed, by the number of the parameter; shape (n, m).
            vectors: The others, of any shape.
            has_data: Whether this rank has samples in this step.
            share: This rank's part of all samples.
            collectives: The operations of all ranks.
        """
        dtype = next(iter(matrices.values())).dtype
        for number, matrix in matrices.items():
            if has_data:
                self._errors.add_to(number, matrix)
            if number not in self._columns:
                chance = np.random.default_rng([self._seed, number])
                first = chance.standard_normal((matrix.shape[1], self._rank)).astype(dtype)
                self._columns[number] = _orthonormal(first)
        thin = {number: (len(matrix), self._rank) for number, matrix in matrices.items()}
        whole = {number: vector.shape for number, vector in vectors.items()}
        mark = self._mark(matrices)
        sent, parts = _flat({**thin, **whole, -1: (2,)}, dtype)
        for number, part in parts:
            if number in matrices:
                np.matmul(matrices[number], self._columns[number], out=part)
            else:
                part[...] = vectors.get(number, 0)
        sent *= share
        parts[-1][1][:] = with_square(mark)
        self._sum(sent, sum(rows * columns for rows, columns in thin.values()), collectives)
        if not are_equal(collectives.size, *parts[-1][1].tolist()):
            raise self._steps.mismatch()
        if not np.isfinite(sent).all():
            make_unusable([*matrices.values(), *vectors.values()])
            return
        received = dict(parts)
        bases = {number: _orthonormal(received[number]) for number in matrices}
        sent, parts = _flat({number: (matrix.shape[1], self._rank) for number, matrix in matrices.items()}, dtype)
        for number, part in parts:
            np.matmul(matrices[number].T, bases[number], out=part)
        sent *= share
        self._sum(sent, sent.size, collectives)
        if not np.isfinite(sent).all():
            make_unusable([*matrices.values(), *vectors.values()])
            return
        for number, part in parts:
            # The same span, so the same iteration; but P would lose twice as many digits without it.
            matrix, self._columns[number] = matrices[number], _orthonormal(part)
            combined = bases[number] @ part.T
            if has_data:
                self._errors.keep(number, matrix - combined)
            matrix[...] = combined
        for number, vector in vectors.items():
            vector[...] = received[number]

    def _sum(self, sent: Array, thin: int, collectives: HierarchicalCollectives) -> None:
        """Add up over the ranks, in place.

        Args:
            sent: Shape ``(n,)``.
            thin: How many elements at the beginning belong to thin matrices, which may be rounded.
            collectives: The operations of all ranks.
        """
        how = self._rounded
        if how is None:
            collectives.allreduce(sent, ReduceOp.SUM)
            return
        wide, half = sent[:thin].astype(how.wide_dtype), np.empty(thin, how.storage)
        how.narrow(wide, half)
        collectives.allreduce(half, how)
        how.combine((half,), wide)
        sent[:thin] = wide
        if thin < sent.size:
            collectives.allreduce(sent[thin:], ReduceOp.SUM)

    def _mark(self, numbers: Mapping[int, Array]) -> int:
        """Return a checksum of the state that all ranks must have in common."""
        return checksum([self._columns[number] for number in numbers], _MARK_BITS, self._steps.made)

    def state_dict(self) -> dict[str, Any]:
        """Return the state: ``step`` and ``columns`` are the same on all ranks, ``errors`` belong to this rank."""
        columns = {number: part.copy() for number, part in self._columns.items()}
        return {"step": self._steps.made, "columns": columns, "errors": self._errors.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that `state_dict` has returned."""
        self._steps.load(state["step"])
        self._columns = {int(number): np.array(part) for number, part in state["columns"].items()}
        self._errors.load(state["errors"])


def _orthonormal(matrix: Array) -> Array:
    """Return orthonormal columns that span what the columns of a matrix span."""
    basis: Array = np.linalg.qr(matrix)[0]
    return basis


def _flat(shapes: Mapping[int, tuple[int, ...]], dtype: Any) -> tuple[Array, list[tuple[int, Array]]]:
    """Return one flat array, and for each key the part of it that has its shape."""
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    flat = np.empty(sum(sizes), dtype)

    def parts() -> Iterator[tuple[int, Array]]:
        start = 0
        for (number, shape), size in zip(shapes.items(), sizes, strict=True):
            yield number, flat[start : start + size].reshape(shape)
            start += size

    return flat, list(parts())
