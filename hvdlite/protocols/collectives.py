"""The contract of the operations of a whole group on host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hvdlite.errors import HvdliteError
from hvdlite.protocols.types import Array, ReduceOp


class Collectives(Protocol):
    """Operations of a whole group on flat arrays. All ranks make the same calls in the same order.

    These operations have no names and no negotiation. `op` is never AVERAGE: the caller divides a sum instead. `op` is
    never ADASUM, because Adasum must know where each tensor ends (`hvdlite.algorithms.adasum`).
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def allreduce(self, data: Array, op: ReduceOp, algorithm: str = "auto") -> None:
        """Reduce `data` over the ranks, in place."""
        ...

    def start_sum(self, data: Array) -> Callable[[], bool]:
        """Start to sum a small array over the ranks, in place.

        Returns:
            A function that says whether the sum is complete. The caller calls it until it returns True.
        """
        ...

    def allgather(self, data: Array, out: Array, counts: Sequence[int]) -> None:
        """Concatenate the ranks' `data` (``counts[r]`` elements from rank r) in `out`."""
        ...

    def broadcast(self, data: Array, root: int) -> None:
        """Overwrite `data` with the data of rank `root`."""
        ...

    def alltoall(self, data: Array, send_counts: Sequence[int], out: Array, recv_counts: Sequence[int]) -> None:
        """Send slice r of `data` to rank r, and put the slice that comes from rank r in slice r of `out`."""
        ...

    def reduce_scatter(self, data: Array, out: Array, counts: Sequence[int], op: ReduceOp) -> None:
        """Reduce `data` over the ranks and keep slice `rank` of it (``counts[rank]`` elements) in `out`."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called this method."""
        ...

    def stop(self, error: HvdliteError) -> None:
        """Fail every wait on this rank, now and later, in every thread, with `error`, if the medium allows it."""
        ...

    def duplicate(self) -> Collectives:
        """Return collectives over the same ranks that may run at the same time as these. All ranks call this."""
        ...

    def close(self) -> None:
        """Release everything. This does not wait for other ranks."""
        ...
