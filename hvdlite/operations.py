"""What the ranks can do together: one class per operation, each knowing what must agree and how it runs.

An operation is built on one rank from that rank's tensors (bad arguments raise here, before anything is sent),
submitted to the engine, and run by it when every rank has submitted its own.
"""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from hvdlite.algorithms import ALGORITHMS
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.protocols import Array, ReduceOp, TensorInfo
from hvdlite.tensors import HALF_DTYPES, adapter_for

Signature = tuple[str, tuple[tuple[str, tuple[int | None, ...]], ...], tuple[tuple[str, Any], ...]]
"""What must be the same on all ranks: kind, (dtype, shape) of each tensor, other arguments by name.

None in a shape stands for a length that may differ from rank to rank. Plain tuples, because they travel often.
"""


_TENSORS_SHOWN = 4


def describe(signature: Signature, start: int = 0) -> str:
    """The signature in words, as errors show it; of a long list of tensors, some from number `start` on."""
    kind, tensors, arguments = signature
    shown = [f"{dtype}({', '.join('*' if n is None else str(n) for n in shape)})" for dtype, shape in tensors]
    if len(shown) > _TENSORS_SHOWN:
        shown = [f"{len(shown)} tensors, from number {start}: {', '.join(shown[start : start + _TENSORS_SHOWN])}, …"]
    return f"{kind}({', '.join([*shown, *(f'{name}={value}' for name, value in arguments)])})"


class Operation:
    """Something that all ranks of a group do together.

    Attributes:
        signature: What must agree between the ranks.
        fusion_key: Operations with equal keys (not None) may run as one, by `run_together`.
        nbytes: Bytes that travel; decides how many operations share one exchange.
        single: The caller gave one tensor and gets one result, not a list.
    """

    fusion_key: Hashable = None
    nbytes: int = 0
    single: bool = False
    signature: Signature

    def run(self, collectives: HierarchicalCollectives) -> Any:
        """Do it; every rank of the group does so at the same point of its sequence. Returns the caller's result."""
        raise NotImplementedError

    def outcome(self, result: Any) -> Any:
        """What the caller gets for what `run` returned."""
        return result[0] if self.single else result

    @classmethod
    def run_together(cls, operations: Sequence[Any], collectives: HierarchicalCollectives) -> list[Any]:
        """Run operations of this class that have the same fusion key; one result each."""
        return [operation.run(collectives) for operation in operations]


class TensorOperation(Operation):
    """An operation on tensors.

    Args:
        given: This rank's tensor, or a list of them.
        inplace: The results overwrite the tensors.

    Raises:
        UnsupportedTensorError: One of them is no tensor, has no numbers in it, or cannot be overwritten.
    """

    def __init__(self, given: Any, inplace: bool = False) -> None:
        self.single = not isinstance(given, list | tuple)
        self.tensors: list[Any] = [given] if self.single else list(given)
        self.inplace = inplace
        self.adapters = [adapter_for(tensor) for tensor in self.tensors]
        self.infos = [adapter.info(tensor) for adapter, tensor in zip(self.adapters, self.tensors, strict=True)]
        if inplace:
            for adapter, tensor in zip(self.adapters, self.tensors, strict=True):
                adapter.check_writable(tensor)


_ALGORITHM_NAMES = ("auto", "shared_memory", "mpi", *ALGORITHMS)


class Allreduce(TensorOperation):
    """Reduce tensors elementwise over the ranks; several tensors, or several of these, share one exchange.

    float16 and bfloat16 are summed as float32 and rounded once at the end. Averages of integers are summed in 64 bits and
    rounded towards zero.
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
        super().__init__(given, inplace)
        self.signature, self.arithmetic, self.nbytes, self.fusion_key = _plan_allreduce(
            tuple(self.infos), op, float(prescale), float(postscale), algorithm
        )

    def run(self, collectives: HierarchicalCollectives) -> Any:
        return self.run_together([self], collectives)[0]

    @classmethod
    def run_together(cls, operations: Sequence[Allreduce], collectives: HierarchicalCollectives) -> list[Any]:
        parts = [
            _Part(tensor, adapter, info.dtype, operation.inplace)
            for operation in operations
            for tensor, adapter, info in zip(operation.tensors, operation.adapters, operation.infos, strict=True)
        ]
        arithmetic = operations[0].arithmetic
        if len(parts) == len(operations) == 1:
            return [_reduce_parts(parts, parts[0].dtype, arithmetic, collectives)]
        results: list[Any] = [None] * len(parts)
        by_dtype: dict[str, list[int]] = {}
        for index, part in enumerate(parts):
            by_dtype.setdefault(part.dtype, []).append(index)
        for dtype, indices in by_dtype.items():
            reduced = _reduce_parts([parts[i] for i in indices], dtype, arithmetic, collectives)
            for index, result in zip(indices, reduced, strict=True):
                results[index] = result
        grouped, start = [], 0
        for operation in operations:
            grouped.append(results[start : start + len(operation.tensors)])
            start += len(operation.tensors)
        return grouped


@functools.lru_cache(maxsize=4096)  # a program makes the same few calls again and again
def _plan_allreduce(
    infos: tuple[TensorInfo, ...], op: ReduceOp, prescale: float, postscale: float, algorithm: str
) -> tuple[Signature, _Arithmetic, int, Hashable]:
    """What of an allreduce depends on its arguments alone: signature, arithmetic, bytes, fusion key."""
    dtypes = {info.dtype for info in infos}
    for dtype in dtypes:
        check_reducible(dtype, op)
    arithmetic = _Arithmetic(op, prescale, postscale, algorithm)
    nbytes = sum(_wire_dtype(info.dtype, op).itemsize * math.prod(info.shape) for info in infos)
    arguments: list[tuple[str, Any]] = [("op", op.value)]
    if (prescale, postscale, algorithm) != (1.0, 1.0, "auto"):
        arguments += [("prescale", prescale), ("postscale", postscale), ("algorithm", algorithm)]
    fusion_key = (next(iter(dtypes)), arithmetic) if len(dtypes) == 1 else None
    return ("allreduce", infos, tuple(arguments)), arithmetic, nbytes, fusion_key


class _Part:
    """One tensor of a fused exchange."""

    __slots__ = ("adapter", "dtype", "inplace", "tensor")

    def __init__(self, tensor: Any, adapter: Any, dtype: str, inplace: bool) -> None:
        self.tensor, self.adapter, self.dtype, self.inplace = tensor, adapter, dtype, inplace

    def deliver(self, array: Array) -> Any:
        """The result for the caller: the tensor itself, overwritten, or a new one."""
        if self.inplace:
            self.adapter.assign(self.tensor, array)
            return self.tensor
        return self.adapter.from_array(array, self.dtype, self.tensor)


def _reduce_parts(
    parts: list[_Part], dtype: str, arithmetic: _Arithmetic, collectives: HierarchicalCollectives
) -> list[Any]:
    """Exchange tensors of one dtype as one flat array."""
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
    arithmetic.allreduce(flat, None if wide or dtype not in HALF_DTYPES else dtype, collectives)
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


class _Arithmetic:
    """The reduction of one flat array: scale, reduce over the ranks, divide, scale. Equal by value, as fusion needs."""

    def __init__(self, op: ReduceOp, prescale: float, postscale: float, algorithm: str) -> None:
        self.op, self._algorithm = op, algorithm
        self._prescale, self._postscale = prescale, postscale
        self.scales_first = prescale != 1.0
        self._reduces = ReduceOp.SUM if op is ReduceOp.AVERAGE else op
        self._finishes = op is ReduceOp.AVERAGE or postscale != 1.0

    def _key(self) -> Hashable:
        return self.op, self._algorithm, self._prescale, self._postscale

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Arithmetic) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def allreduce(self, flat: Array, dtype: str | None, collectives: HierarchicalCollectives) -> None:
        """Reduce `flat` in place."""
        _scale(flat, self._prescale)
        finish = functools.partial(self._finish, collectives.size) if self._finishes else None
        collectives.allreduce(flat, self._reduces, self._algorithm, dtype, finish)

    def reduce_scatter(self, flat: Array, counts: Sequence[int], collectives: HierarchicalCollectives) -> Array:
        """This rank's slice of the result. `flat` may be changed."""
        _scale(flat, self._prescale)
        out = np.empty(counts[collectives.rank], flat.dtype)
        collectives.reduce_scatter(flat, out, counts, self._reduces)
        self._finish(collectives.size, out)
        return out

    def _finish(self, size: int, flat: Array) -> None:
        if self.op is ReduceOp.AVERAGE:
            _divide(flat, size)
        _scale(flat, self._postscale)


def _scale(flat: Array, factor: float) -> None:
    if factor != 1.0:
        # Integers are scaled as float64 and rounded towards zero, which a cast does.
        np.multiply(flat, factor, out=flat, casting="unsafe")


def _divide(flat: Array, size: int) -> None:
    if flat.dtype.kind not in "iu":
        np.divide(flat, size, out=flat)
        return
    negative = (flat < 0) & (flat % size != 0)
    np.floor_divide(flat, size, out=flat)
    flat += negative.astype(flat.dtype)  # from rounding down to rounding towards zero


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
        super().__init__(given)
        for info in self.infos:
            check_reducible(info.dtype, op)
            if not info.shape:
                raise UnsupportedTensorError(
                    "reducescatter splits the first dimension among the ranks; a 0-d tensor has none."
                )
        self.arithmetic = _Arithmetic(op, float(prescale), float(postscale), "auto")
        arguments = (("op", op.value), ("prescale", prescale), ("postscale", postscale))
        self.signature = ("reducescatter", tuple(self.infos), arguments)

    def run(self, collectives: HierarchicalCollectives) -> list[Any]:
        return [self._run_one(*one, collectives) for one in zip(self.tensors, self.adapters, self.infos, strict=True)]

    def _run_one(self, tensor: Any, adapter: Any, info: Any, collectives: HierarchicalCollectives) -> Any:
        array = adapter.to_array(tensor, wide=True)
        flat = array.reshape(-1).astype(_wire_dtype(info.dtype, self.arithmetic.op))
        rows = split_rows(array.shape[0], collectives.size)
        row = math.prod(array.shape[1:])
        counts = [n * row for n in rows]

        out = self.arithmetic.reduce_scatter(flat, counts, collectives)
        shape = (rows[collectives.rank], *array.shape[1:])
        return adapter.from_array(out.astype(array.dtype, copy=False).reshape(shape), info.dtype, tensor)


def split_rows(rows: int, size: int) -> list[int]:
    """How many of `rows` rows each of `size` ranks gets: the first ones one more where it does not divide."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


class Allgather(TensorOperation):
    """Concatenate the ranks' tensors along the first dimension, whose length may differ; scalars make a vector."""

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        self.signature = ("allgather", tuple((info.dtype, (None, *info.shape[1:])) for info in self.infos), ())

    def run(self, collectives: HierarchicalCollectives) -> list[Any]:
        arrays = [
            np.atleast_1d(adapter.to_array(tensor, wide=False))
            for adapter, tensor in zip(self.adapters, self.tensors, strict=True)
        ]
        lengths = np.empty((collectives.size, len(arrays)), np.int64)
        own = np.array([array.shape[0] for array in arrays], np.int64)
        collectives.allgather(own, lengths.reshape(-1), [len(arrays)] * collectives.size)
        results = []
        for index, array in enumerate(arrays):
            out = np.empty((int(lengths[:, index].sum()), *array.shape[1:]), array.dtype)
            row = math.prod(array.shape[1:])
            collectives.allgather(array.reshape(-1), out.reshape(-1), [int(n) * row for n in lengths[:, index]])
            results.append(self.adapters[index].from_array(out, self.infos[index].dtype, self.tensors[index]))
        return results


class Broadcast(TensorOperation):
    """Give every rank the root's tensors."""

    def __init__(self, given: Any, root: int, size: int, inplace: bool = False) -> None:
        self.root = check_root(root, size)
        super().__init__(given, inplace)
        self.signature = ("broadcast", tuple(self.infos), (("root_rank", self.root),))

    def run(self, collectives: HierarchicalCollectives) -> list[Any]:
        results = []
        for tensor, adapter, (dtype, _) in zip(self.tensors, self.adapters, self.infos, strict=True):
            array = adapter.to_array(tensor, wide=False)
            if not (self.inplace and array.flags.writeable):
                array = array.copy()
            collectives.broadcast(array.reshape(-1), self.root)
            results.append(_Part(tensor, adapter, dtype, self.inplace).deliver(array))
        return results


def check_root(root: int, size: int) -> int:
    """The root as an int.

    Raises:
        ArgumentError: It is not a rank of the group.
    """
    if isinstance(root, bool) or not isinstance(root, int | np.integer) or not 0 <= root < size:
        raise ArgumentError(f"root_rank={root!r}: expected a rank of the group, 0 to {size - 1}.")
    return int(root)


class Alltoall(TensorOperation):
    """Send a slice of the rows to every rank and receive one from each.

    Each result is a pair: the received rows in the order of the senders, and how many came from each (int32), or the former
    alone where the caller gave no splits.
    """

    def __init__(self, given: Any, splits: Any, size: int) -> None:
        super().__init__(given)
        for info in self.infos:
            if not info.shape:
                raise UnsupportedTensorError(
                    "alltoall splits the first dimension among the ranks; a 0-d tensor has none."
                )
        self.even = splits is None
        self.splits = [_check_splits(splits, info.shape[0], size) for info in self.infos]
        self.signature = ("alltoall", tuple((info.dtype, (None, *info.shape[1:])) for info in self.infos), ())

    def run(self, collectives: HierarchicalCollectives) -> list[Any]:
        return [
            self._run_one(*one, collectives)
            for one in zip(self.tensors, self.adapters, self.infos, self.splits, strict=True)
        ]

    def _run_one(
        self, tensor: Any, adapter: Any, info: Any, splits: Array, collectives: HierarchicalCollectives
    ) -> Any:
        array = adapter.to_array(tensor, wide=False)
        received = np.empty(collectives.size, np.int64)
        ones = [1] * collectives.size
        collectives.alltoall(splits, ones, received, ones)
        row = math.prod(array.shape[1:])
        out = np.empty((int(received.sum()), *array.shape[1:]), array.dtype)
        send_counts, recv_counts = ([int(n) * row for n in counts] for counts in (splits, received))
        collectives.alltoall(array.reshape(-1), send_counts, out.reshape(-1), recv_counts)
        result = adapter.from_array(out, info.dtype, tensor)
        return result if self.even else (result, adapter.from_array(received.astype(np.int32), "int32", tensor))


def _check_splits(splits: Any, rows: int, size: int) -> Array:
    if splits is None:
        if rows % size:
            raise ArgumentError(
                f"alltoall without splits needs a first dimension that {size} ranks divide; got {rows}. Pass splits."
            )
        return np.full(size, rows // size, np.int64)
    given = np.asarray(splits)
    if given.dtype.kind not in "iu" and given.size:
        raise ArgumentError(f"splits={splits!r}: expected {size} whole numbers.")
    if given.shape != (size,) or (given < 0).any() or int(given.sum()) != rows:
        raise ArgumentError(
            f"splits={given.tolist()}: expected {size} numbers >= 0, one for each rank, that add up to the first "
            f"dimension, {rows}; they are {given.size} and add up to {int(given.sum())}."
        )
    return given.astype(np.int64)


class Barrier(Operation):
    """Wait for everybody. Agreeing that all are here is all there is to do."""

    def __init__(self) -> None:
        self.signature = ("barrier", (), ())

    def run(self, collectives: HierarchicalCollectives) -> None:
        return None


class BroadcastObject(Operation):
    """Give every rank the root's object (pickled)."""

    def __init__(self, value: Any, root: int, rank: int, size: int) -> None:
        self.root = check_root(root, size)
        self.pickled = _pickle(value) if rank == root else None
        self.value = value
        self.signature = ("broadcast_object", (), (("root_rank", self.root),))

    def run(self, collectives: HierarchicalCollectives) -> Any:
        length = np.array([0 if self.pickled is None else self.pickled.size], np.int64)
        collectives.broadcast(length, self.root)
        data = np.empty(int(length[0]), np.uint8) if self.pickled is None else self.pickled
        collectives.broadcast(data, self.root)
        return self.value if self.pickled is not None else pickle.loads(data.tobytes())


class AllgatherObject(Operation):
    """Give every rank the list of everybody's objects, by rank (pickled)."""

    def __init__(self, value: Any) -> None:
        self.pickled = _pickle(value)
        self.signature = ("allgather_object", (), ())

    def run(self, collectives: HierarchicalCollectives) -> list[Any]:
        lengths = np.empty(collectives.size, np.int64)
        collectives.allgather(np.array([self.pickled.size], np.int64), lengths, [1] * collectives.size)
        out = np.empty(int(lengths.sum()), np.uint8)
        collectives.allgather(self.pickled, out, lengths.tolist())
        ends = np.cumsum(lengths)
        return [pickle.loads(out[end - length : end].tobytes()) for end, length in zip(ends, lengths, strict=True)]


def _pickle(value: Any) -> Array:
    return np.frombuffer(bytearray(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)), np.uint8)


class Agreement(Operation):
    """Do something local at the same point of every rank's sequence, once all ranks have asked for the very same.

    How communicators are made: an order that differs between the ranks is an error here and not a hang inside MPI.
    """

    def __init__(
        self, kind: str, arguments: Sequence[tuple[str, Any]], action: Callable[[HierarchicalCollectives], Any]
    ) -> None:
        self.signature = (kind, (), tuple(arguments))
        self.action = action

    def run(self, collectives: HierarchicalCollectives) -> Any:
        return self.action(collectives)
