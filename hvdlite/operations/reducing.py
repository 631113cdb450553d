"""Operations that reduce over the ranks: allreduce and reducescatter."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from hvdlite.algorithms import ALGORITHMS
from hvdlite.algorithms.adasum import check_adasum
from hvdlite.arithmetic import arithmetic as kernel_of
from hvdlite.comm.device import DeviceCollectives, Wire
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.operations.base import Part, Signature, TensorOperation
from hvdlite.operations.nothing import Nothing, neutral_element
from hvdlite.operations.placed import agree
from hvdlite.operations.placed_reducing import DevicePiece, DeviceReduction, Scaling
from hvdlite.protocols import Array, ReduceOp, TensorInfo
from hvdlite.tensors import HALF_DTYPES

_ALGORITHM_NAMES = ("auto", "shared_memory", "mpi", *ALGORITHMS)


class Allreduce(TensorOperation):
    """Reduce tensors elementwise over the ranks; several tensors, or several of these, share one exchange.

    float16 and bfloat16 are summed as float32 and rounded once at the end. Averages of integers are summed in 64 bits and
    rounded down, as ``//`` does.
    """

    def __init__(
        self,
        given: Any,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
        algorithm: str = "auto",
        inplace: bool = False,
    ) -> None:
        check_op(op)
        if algorithm not in _ALGORITHM_NAMES:
            raise ArgumentError(f"algorithm={algorithm!r}: expected one of {', '.join(map(repr, _ALGORITHM_NAMES))}.")
        if op is ReduceOp.ADASUM and algorithm != "auto":
            raise ArgumentError(f"algorithm={algorithm!r}: Adasum has one algorithm only; leave the argument out.")
        super().__init__(given, inplace)
        self.signature, self.arithmetic, self.nbytes, self.fusion_key = _plan_allreduce(
            tuple(self.infos), op, float(prescale), float(postscale), algorithm, self.where
        )

    @classmethod
    def run_on_host(cls, operations: Sequence[Allreduce], collectives: HierarchicalCollectives) -> list[Any]:
        parts = _parts_of(operations)
        arithmetic = operations[0].arithmetic
        if len(parts) == len(operations) == 1:
            return [_reduce_parts(parts, parts[0].dtype, arithmetic, collectives)]
        results: list[Any] = [None] * len(parts)
        for dtype, indices in _by_dtype(parts).items():
            reduced = _reduce_parts([parts[i] for i in indices], dtype, arithmetic, collectives)
            for index, result in zip(indices, reduced, strict=True):
                results[index] = result
        return _of_each(operations, results)

    @classmethod
    def run_on_device(
        cls, operations: Sequence[Allreduce], collectives: HierarchicalCollectives, channel: DeviceCollectives
    ) -> list[Any]:
        parts = _parts_of(operations)
        natives = [
            native
            for operation in operations
            for native in (operation.place.natives if operation.place else [None] * len(operation.tensors))
        ]
        shapes = [info.shape for operation in operations for info in operation.infos]
        arithmetic = operations[0].arithmetic
        scaling = arithmetic.scaling
        results: list[Any] = [None] * len(parts)
        reductions: list[tuple[list[int], DeviceReduction]] = []
        on_host: list[tuple[str, list[int]]] = []
        problem: Exception | None = None
        try:
            for dtype, indices in _by_dtype(parts).items():
                wire = arithmetic.wire(dtype, channel)
                if wire is None:
                    on_host.append((dtype, indices))
                    continue
                pieces = [DevicePiece(natives[i], shapes[i], parts[i].inplace) for i in indices]
                reductions.append((indices, DeviceReduction(pieces, dtype, wire, scaling, channel)))
        except Exception as error:  # most of all: no memory; the others must hear of it
            problem = error
        agree(collectives, problem)
        for dtype, indices in on_host:
            for index, result in zip(
                indices, _reduce_parts([parts[i] for i in indices], dtype, arithmetic, collectives), strict=True
            ):
                results[index] = result
        for indices, reduction in reductions:
            for index, result in zip(indices, reduction.allreduce(), strict=True):
                results[index] = parts[index].tensor if parts[index].inplace else result
        return _of_each(operations, results)


def _parts_of(operations: Sequence[Allreduce]) -> list[Part]:
    return [
        Part(tensor, adapter, info.dtype, operation.inplace)
        for operation in operations
        for tensor, adapter, info in zip(operation.tensors, operation.adapters, operation.infos, strict=True)
    ]


def _by_dtype(parts: Sequence[Part]) -> dict[str, list[int]]:
    """The numbers of the parts of each dtype."""
    by_dtype: dict[str, list[int]] = {}
    for index, part in enumerate(parts):
        by_dtype.setdefault(part.dtype, []).append(index)
    return by_dtype


def _of_each(operations: Sequence[Allreduce], results: list[Any]) -> list[Any]:
    """The results of all parts, as a list for each operation."""
    grouped, start = [], 0
    for operation in operations:
        grouped.append(results[start : start + len(operation.tensors)])
        start += len(operation.tensors)
    return grouped


@functools.lru_cache(maxsize=4096)  # a program makes the same few calls again and again
def _plan_allreduce(
    infos: tuple[TensorInfo, ...],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    algorithm: str,
    where: tuple[tuple[str, Any], ...],
) -> tuple[Signature, _Arithmetic, int, Hashable]:
    """What of an allreduce depends on its arguments alone: signature, arithmetic, bytes, fusion key."""
    dtypes = {info.dtype for info in infos}
    for dtype in dtypes:
        check_reducible(dtype, op)
    arithmetic = _Arithmetic(op, prescale, postscale, algorithm)
    nbytes = sum(_wire_bytes(info.dtype, op) * math.prod(info.shape) for info in infos)
    arguments: list[tuple[str, Any]] = [("op", op.value)]
    if (prescale, postscale, algorithm) != (1.0, 1.0, "auto"):
        arguments += [("prescale", prescale), ("postscale", postscale), ("algorithm", algorithm)]
    arguments += where
    fusion_key = (next(iter(dtypes)), arithmetic, where) if len(dtypes) == 1 else None
    return ("allreduce", infos, tuple(arguments)), arithmetic, nbytes, fusion_key


def _reduce_parts(
    parts: list[Part], dtype: str, arithmetic: _Arithmetic, collectives: HierarchicalCollectives
) -> list[Any]:
    """Exchange tensors of one dtype as one flat array."""
    if arithmetic.op is ReduceOp.ADASUM:
        return _adasum_parts(parts, arithmetic, collectives)
    wide = arithmetic.scales_first  # halves would be rounded twice
    arrays = [part.adapter.to_array(part.tensor, wide=wide) for part in parts]
    wire = _wire_dtype(dtype, arithmetic.op) if wide or dtype not in HALF_DTYPES else arrays[0].dtype
    if len(parts) == 1:
        flat = arrays[0].reshape(-1)
        own = parts[0].inplace and flat.dtype == wire and flat.flags.writeable
        if not own:
            flat = flat.astype(wire)
    else:
        flat = np.concatenate([array.reshape(-1) for array in arrays], dtype=wire, casting="unsafe")
    nothing = _where_nothing_is(parts, arrays) if any([part.is_nothing for part in parts]) else ()
    arithmetic.allreduce(flat, None if wide or dtype not in HALF_DTYPES else dtype, collectives, nothing)
    if len(parts) == 1 and own and arrays[0] is parts[0].tensor:  # reduced where it lies
        return [parts[0].tensor]
    flat = flat.astype(arrays[0].dtype, copy=False)
    results, start = [], 0
    for part, array in zip(parts, arrays, strict=True):
        piece = flat[start : start + array.size].reshape(array.shape)
        start += array.size
        # A result that is a view would keep the whole exchange's memory alive.
        results.append(part.deliver(piece if part.inplace or len(parts) == 1 else piece.copy()))
    return results


def _where_nothing_is(parts: list[Part], arrays: list[Array]) -> list[slice]:
    ends = itertools.accumulate(array.size for array in arrays)
    return [
        slice(end - array.size, end) for part, array, end in zip(parts, arrays, ends, strict=True) if part.is_nothing
    ]


def _adasum_parts(parts: list[Part], arithmetic: _Arithmetic, collectives: HierarchicalCollectives) -> list[Any]:
    """Combine tensors of one dtype by Adasum, each by itself, in one exchange."""
    arrays = [part.adapter.to_array(part.tensor, wide=True) for part in parts]
    for index, (part, array) in enumerate(zip(parts, arrays, strict=True)):
        if not (part.inplace and array.flags.writeable):
            arrays[index] = array.copy()
    arithmetic.adasum([array.reshape(-1) for array in arrays], collectives)
    return [part.deliver(array) for part, array in zip(parts, arrays, strict=True)]


class _Arithmetic:
    """The reduction of one flat array: scale, reduce over the ranks, divide, scale. Equal by value, as fusion needs."""

    def __init__(self, op: ReduceOp, prescale: float, postscale: float, algorithm: str) -> None:
        self.op, self._algorithm = op, algorithm
        self._prescale, self._postscale = prescale, postscale
        self.scales_first = prescale != 1.0
        self._reduces = ReduceOp.SUM if op is ReduceOp.AVERAGE else op
        self._finishes = op is ReduceOp.AVERAGE or postscale != 1.0
        self.scaling = Scaling(op, prescale, postscale)

    def wire(self, dtype: str, channel: DeviceCollectives) -> Wire | None:
        """How a dtype is reduced on a GPU; None if through the host, as its own algorithms and integers times a factor are."""
        scales = self._prescale != 1.0 or self._postscale != 1.0
        if self._algorithm != "auto" or (scales and dtype.startswith(("int", "uint", "bool"))):
            return None
        return channel.wire(dtype, self.op)

    def _key(self) -> Hashable:
        return self.op, self._algorithm, self._prescale, self._postscale

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Arithmetic) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def allreduce(
        self,
        flat: Array,
        dtype: str | None,
        collectives: HierarchicalCollectives,
        nothing: Sequence[slice] = (),
    ) -> None:
        """Reduce `flat` in place. This rank adds no values where `nothing` says so."""
        _scale(flat, self._prescale)
        for where in nothing:
            self._neutralize(flat[where], dtype)
        finish = functools.partial(self._finish, collectives.size) if self._finishes else None
        collectives.allreduce(flat, self._reduces, self._algorithm, dtype, finish)

    def adasum(self, tensors: Sequence[Array], collectives: HierarchicalCollectives) -> None:
        """Combine flat tensors in place."""
        for tensor in tensors:
            _scale(tensor, self._prescale)
        collectives.adasum(tensors)
        for tensor in tensors:
            self._finish(collectives.size, tensor)

    def reduce_scatter(
        self, flat: Array, counts: Sequence[int], collectives: HierarchicalCollectives, nothing: bool = False
    ) -> Array:
        """This rank's slice of the result. `flat` may be changed; this rank adds no values if `nothing`."""
        _scale(flat, self._prescale)
        if nothing:
            self._neutralize(flat, None)
        out = np.empty(counts[collectives.rank], flat.dtype)
        collectives.reduce_scatter(flat, out, counts, self._reduces)
        self._finish(collectives.size, out)
        return out

    def _neutralize(self, flat: Array, dtype: str | None) -> None:
        if dtype is None:
            flat[...] = neutral_element(self.op, flat.dtype)
        else:  # halves
            kernel = kernel_of(dtype, self._reduces)
            kernel.narrow(np.full(flat.size, neutral_element(self.op, kernel.wide), kernel.wide), flat)

    def _finish(self, size: int, flat: Array) -> None:
        if self.op is ReduceOp.AVERAGE:
            _divide(flat, size)
        _scale(flat, self._postscale)


def _scale(flat: Array, factor: float) -> None:
    if factor != 1.0:
        # Integers are scaled as float64 and cast back.
        np.multiply(flat, factor, out=flat, casting="unsafe")


def _divide(flat: Array, size: int) -> None:
    if flat.dtype.kind not in "iu":
        np.divide(flat, size, out=flat)
        return
    np.floor_divide(flat, size, out=flat)


@functools.cache
def _wire_dtype(dtype: str, op: ReduceOp) -> np.dtype[Any]:
    """The dtype in which values of `dtype` are reduced."""
    if dtype in HALF_DTYPES:
        return np.dtype(np.float32)
    if dtype == "bool":
        return np.dtype(np.uint8)
    wire = np.dtype(dtype)
    if op is ReduceOp.AVERAGE and wire.kind in "iu" and wire != np.uint64:
        return np.dtype(np.int64)
    return wire


def _wire_bytes(dtype: str, op: ReduceOp) -> int:
    return 1 if dtype.startswith("float8") else _wire_dtype(dtype, op).itemsize


def check_op(op: ReduceOp) -> None:
    """Let a ReduceOp pass.

    Raises:
        ArgumentError: It is none.
    """
    if not isinstance(op, ReduceOp):
        raise ArgumentError(f"op={op!r}: expected one of {', '.join(f'hvdlite.{each!r}' for each in ReduceOp)}.")


def check_reducible(dtype: str, op: ReduceOp) -> None:
    """Let a dtype pass that `op` makes sense for.

    Raises:
        UnsupportedTensorError: It makes none.
    """
    if op is ReduceOp.ADASUM:
        check_adasum(dtype)
    if dtype == "bool" and op in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise UnsupportedTensorError(
            f"{op!r} of bool is not defined: use Max for 'any', Min for 'all', or cast to an integer to count."
        )
    if dtype.startswith("complex") and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise UnsupportedTensorError(f"{op!r} of {dtype} is not defined: complex numbers have no order.")


class Reducescatter(TensorOperation):
    """Reduce tensors over the ranks, each rank keeping its share of the rows (the first ranks one more, if uneven)."""

    def __init__(self, given: Any, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0) -> None:
        check_op(op)
        if op is ReduceOp.ADASUM:
            raise ArgumentError("op=Adasum: reducescatter takes Sum, Average, Min, Max and Product. Use allreduce.")
        super().__init__(given)
        for info in self.infos:
            check_reducible(info.dtype, op)
            if not info.shape:
                raise UnsupportedTensorError(
                    "reducescatter splits the first dimension among the ranks; a 0-d tensor has none."
                )
        self.arithmetic = _Arithmetic(op, float(prescale), float(postscale), "auto")
        arguments = (("op", op.value), ("prescale", float(prescale)), ("postscale", float(postscale)), *self.where)
        self.signature = ("reducescatter", tuple(self.infos), arguments)

    def exchange_on_device(self, collectives: HierarchicalCollectives, channel: DeviceCollectives) -> list[Any]:
        natives = self.place.natives if self.place else [None] * len(self.tensors)
        counts = []
        reductions: list[DeviceReduction | None] = []
        problem: Exception | None = None
        for info in self.infos:
            rows = split_rows(info.shape[0], collectives.size)
            counts.append([n * math.prod(info.shape[1:]) for n in rows])
        try:
            for native, info, mine in zip(natives, self.infos, counts, strict=True):
                wire = self.arithmetic.wire(info.dtype, channel)
                piece = DevicePiece(native, info.shape, False)
                reductions.append(
                    None
                    if wire is None
                    else DeviceReduction([piece], info.dtype, wire, self.arithmetic.scaling, channel, mine)
                )
        except Exception as error:
            problem = error
        agree(collectives, problem)
        results: list[Any] = []
        for index, reduction in enumerate(reductions):
            if reduction is None:
                results.append(self._run_one(self.tensors[index], self.adapters[index], self.infos[index], collectives))
                continue
            kept = reduction.reduce_scatter()
            rows = split_rows(self.infos[index].shape[0], collectives.size)
            results.append(channel.device.shaped(kept, (rows[collectives.rank], *self.infos[index].shape[1:])))
        return results

    def exchange(self, collectives: HierarchicalCollectives) -> list[Any]:
        return [self._run_one(*one, collectives) for one in zip(self.tensors, self.adapters, self.infos, strict=True)]

    def _run_one(self, tensor: Any, adapter: Any, info: Any, collectives: HierarchicalCollectives) -> Any:
        array = adapter.to_array(tensor, wide=True)
        flat = array.reshape(-1).astype(_wire_dtype(info.dtype, self.arithmetic.op))
        rows = split_rows(array.shape[0], collectives.size)
        row = math.prod(array.shape[1:])
        counts = [n * row for n in rows]

        out = self.arithmetic.reduce_scatter(flat, counts, collectives, isinstance(tensor, Nothing))
        shape = (rows[collectives.rank], *array.shape[1:])
        return adapter.from_array(out.astype(array.dtype, copy=False).reshape(shape), info.dtype, tensor)


def split_rows(rows: int, size: int) -> list[int]:
    """How many of `rows` rows each of `size` ranks gets: the first ones one more where it does not divide."""
    return [rows // size + (rank < rows % size) for rank in range(size)]
