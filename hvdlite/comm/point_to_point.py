"""Collectives made of point-to-point messages: the algorithms of `hvdlite.algorithms` on any transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdlite.algorithms import ALGORITHMS
from hvdlite.algorithms.allgather import ring_allgather
from hvdlite.algorithms.alltoall import pairwise_alltoall
from hvdlite.algorithms.barrier import dissemination_barrier
from hvdlite.algorithms.broadcast import binomial_broadcast
from hvdlite.algorithms.choose import choose
from hvdlite.algorithms.reduce_scatter import ring_reduce_scatter
from hvdlite.algorithms.slices import slices
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.protocols import Array, Combine, ReduceOp, Transport, numpy_combine


class PointToPointCollectives:
    """The `Collectives` of the ranks of a transport.

    Args:
        transport: The transport over the group. From now on only this object may call its `send`, `recv` and `sendrecv`.
        combine: A function that returns the elementwise reduction of a `ReduceOp`.
    """

    def __init__(self, transport: Transport, combine: Callable[[ReduceOp], Combine] = numpy_combine) -> None:
        self.transport = transport
        """The transport under the collectives."""
        self._combine = combine

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return self.transport.size

    def allreduce(self, data: Array, op: ReduceOp, algorithm: str = "auto") -> None:
        """Reduce `data` over the ranks, in place, to the same bits on every rank.

        Args:
            data: Shape ``(n,)``, the same on every rank.
            op: Any `ReduceOp` but AVERAGE. For booleans SUM is "or" and PRODUCT is "and", as in NumPy.
            algorithm: A name in `hvdlite.algorithms.ALGORITHMS`. "auto" chooses by the number of ranks and bytes.

        Raises:
            ArgumentError: There is no algorithm of this name.
        """
        if algorithm == "auto":
            algorithm = choose(self.size, data.nbytes)
        if algorithm not in ALGORITHMS:
            reason = "there is no MPI under this transport" if algorithm == "mpi" else "it does not exist"
            raise ArgumentError(
                f"Algorithm {algorithm!r} cannot be used: {reason}. Choose one of auto, {', '.join(ALGORITHMS)}."
            )
        ALGORITHMS[algorithm](self.transport, data, self._combine(op))

    def start_sum(self, data: Array) -> Callable[[], bool]:
        """Sum `data` over the ranks, in place, before this function returns.

        Returns:
            A function that returns True: the sum is complete, because these collectives do no work in the background.
        """
        self.allreduce(data, ReduceOp.SUM)
        return lambda: True

    def allgather(self, data: Array, out: Array, counts: Sequence[int]) -> None:
        """Concatenate the ranks' `data` (``counts[r]`` elements from rank r) in `out`.

        Raises:
            ArgumentError: The sizes of `data` or `out` differ from what `counts` says.
        """
        self._check_counts("counts", counts, "out", out)
        self._check_own("data", data, counts)
        out[slices(counts)[self.rank]] = data
        ring_allgather(self.transport, out, counts)

    def broadcast(self, data: Array, root: int) -> None:
        """Overwrite `data` with the data of rank `root`.

        Raises:
            ArgumentError: `root` is not a rank of the group.
        """
        if not 0 <= root < self.size:
            raise ArgumentError(f"The root must be a rank from 0 to {self.size - 1}, not {root}.")
        binomial_broadcast(self.transport, data, root)

    def alltoall(self, data: Array, send_counts: Sequence[int], out: Array, recv_counts: Sequence[int]) -> None:
        """Send slice r of `data` to rank r, and put the slice that comes from rank r in slice r of `out`.

        Raises:
            ArgumentError: The size of `data` or `out` differs from the sum of its counts.
        """
        self._check_counts("send_counts", send_counts, "data", data)
        self._check_counts("recv_counts", recv_counts, "out", out)
        pairwise_alltoall(self.transport, data, send_counts, out, recv_counts)

    def reduce_scatter(self, data: Array, out: Array, counts: Sequence[int], op: ReduceOp) -> None:
        """Reduce `data` over the ranks, and put slice `rank` of the result (``counts[rank]`` elements) in `out`.

        The function only reads `data`.

        Raises:
            ArgumentError: The size of `data` or `out` differs from what `counts` says.
        """
        self._check_counts("counts", counts, "data", data)
        self._check_own("out", out, counts)
        ring_reduce_scatter(self.transport, data, out, counts, self._combine(op))

    def barrier(self) -> None:
        """Return when every rank has called it."""
        dissemination_barrier(self.transport)

    def stop(self, error: HvdliteError) -> None:
        """Do nothing: a transport fails by itself."""

    def duplicate(self) -> PointToPointCollectives:
        """Return collectives over the same ranks that may run at the same time as these. All ranks call this."""
        return PointToPointCollectives(self.transport.duplicate(), self._combine)

    def close(self) -> None:
        """Close the transport. This does not wait for other ranks."""
        self.transport.close()

    def _check_counts(self, name: str, counts: Sequence[int], array_name: str, array: Array) -> None:
        if len(counts) != self.size or sum(counts) != array.size:
            raise ArgumentError(
                f"{name} must have {self.size} entries that add up to the {array.size} elements of {array_name}; "
                f"it has {len(counts)} that add up to {sum(counts)}."
            )

    def _check_own(self, array_name: str, array: Array, counts: Sequence[int]) -> None:
        if array.size != counts[self.rank]:
            raise ArgumentError(
                f"{array_name} has {array.size} elements; counts says {counts[self.rank]} for rank {self.rank}."
            )
