"""MPI's own collectives, and the algorithms of `hvdlite.algorithms` over MPI's messages. Importing this module starts MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hvdlite.algorithms import ALGORITHMS
from hvdlite.comm.mpi.errors import in_our_words, maps_all_errors, maps_errors, maps_own_errors
from hvdlite.comm.mpi.transport import MpiTransport, as_bytes
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.protocols import Array, ReduceOp, Transport, numpy_combine, ufunc_of

_OPS = {ReduceOp.SUM: MPI.SUM, ReduceOp.MIN: MPI.MIN, ReduceOp.MAX: MPI.MAX, ReduceOp.PRODUCT: MPI.PROD}


def _numpy_op(op: ReduceOp) -> MPI.Op:
    """Return an operation of MPI that reduces floating-point numbers by NumPy. MPI calls it once for a whole array."""
    ufunc = ufunc_of(op)

    def reduce(source: Any, into: Any, datatype: MPI.Datatype) -> None:
        dtype = np.dtype(datatype.tocode())
        result = np.frombuffer(into, dtype)
        ufunc(np.frombuffer(source, dtype), result, out=result)

    return MPI.Op.Create(reduce, commute=True)


# MPI's own MIN and MAX can lose a NaN: whether they do depends on the rank that has it.
_NAN_OPS = {op: _numpy_op(op) for op in (ReduceOp.MIN, ReduceOp.MAX)}


def _op(op: ReduceOp, data: Array) -> MPI.Op:
    return _NAN_OPS[op] if op in _NAN_OPS and data.dtype.kind == "f" else _OPS[op]


_LARGEST_BYTES = 2**30
"""The largest message that is passed to MPI at once: MPI counts in 32 bits."""


def _parts(data: Array) -> Sequence[Array]:
    """Return `data` in consecutive pieces of at most `_LARGEST_BYTES` bytes."""
    length = max(1, _LARGEST_BYTES // data.itemsize)
    if data.size <= length:
        return (data,)
    return [data[start : start + length] for start in range(0, data.size, length)]


@maps_all_errors
class MpiCollectives:
    """MPI's own collectives, and the algorithms of `hvdlite.algorithms` over MPI's messages."""

    def __init__(self, transport: Transport) -> None:
        assert isinstance(transport, MpiTransport)
        self._transport = transport
        self._comm = transport.comm
        self.rank = transport.rank
        self.size = transport.size

    @maps_own_errors
    def allreduce(self, data: Array, op: ReduceOp, algorithm: str = "auto") -> None:
        if algorithm in ("auto", "mpi"):
            try:
                for part in _parts(data):
                    self._transport.call("Allreduce", MPI.IN_PLACE, part, _op(op, data))
            except MPI.Exception as error:
                raise in_our_words("allreduce", error) from error
        elif algorithm in ALGORITHMS:
            ALGORITHMS[algorithm](self._transport, data, numpy_combine(op))
        else:
            raise ArgumentError(
                f"algorithm={algorithm!r}: expected one of 'auto', 'mpi', {', '.join(map(repr, ALGORITHMS))}."
            )

    def start_sum(self, data: Array) -> Callable[[], bool]:
        request = self._comm.Iallreduce(MPI.IN_PLACE, data, MPI.SUM)
        return maps_errors(request.Test)

    def allgather(self, data: Array, out: Array, counts: Sequence[int]) -> None:
        sizes = [count * data.itemsize for count in counts]
        self._transport.call("Allgatherv", as_bytes(data), [out.view(np.uint8), sizes, MPI.BYTE])

    def broadcast(self, data: Array, root: int) -> None:
        for part in _parts(data):
            self._transport.call("Bcast", as_bytes(part), root)

    def alltoall(self, data: Array, send_counts: Sequence[int], out: Array, recv_counts: Sequence[int]) -> None:
        send = [data.view(np.uint8), [count * data.itemsize for count in send_counts], MPI.BYTE]
        recv = [out.view(np.uint8), [count * data.itemsize for count in recv_counts], MPI.BYTE]
        self._transport.call("Alltoallv", send, recv)

    def reduce_scatter(self, data: Array, out: Array, counts: Sequence[int], op: ReduceOp) -> None:
        self._transport.call("Reduce_scatter", data, out, list(counts), _op(op, data))

    def barrier(self) -> None:
        self._transport.call("Barrier")

    def stop(self, error: HvdliteError) -> None:
        pass  # nothing interrupts MPI; if it can be done without, `Interrupt` does it

    def duplicate(self) -> MpiCollectives:
        return MpiCollectives(self._transport.duplicate())

    def close(self) -> None:
        self._transport.close()
