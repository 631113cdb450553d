"""What all ranks of a group do together, on host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hvdlite.protocols.types import Array, ReduceOp


class Collectives(Protocol):
    """Whole-group operations on one-dimensional arrays, called by all ranks in the same order.

    The data plane: no negotiation, no names, no tensors. `op` is never AVERAGE here: averaging is
    a sum and a division, and the caller knows best where to divide. Nor is it ADASUM, which needs to know
    where one tensor ends and the next begins (`hvdlite.algorithms.adasum`).
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def allreduce(self, data: Array, op: ReduceOp, algorithm: str = "auto") -> None:
        """Reduce `data` over the ranks, in place."""
        ...

    def start_sum(self, data: Array) -> Callable[[], bool]:
        """Begin to sum a small array over the ranks, in place.

        Returns:
            What tells whether it is over, and is to be asked until it is: the caller decides how to wait.
        """
        ...

    def allgather(self, data: Array, out: Array, counts: Sequence[int]) -> None:
        """Concatenate the ranks' `data` (``counts[r]`` elements from rank r) in `out`."""
        ...

    def broadcast(self, data: Array, root: int) -> None:
        """Overwrite `data` with rank `root`'s."""
        ...

    def alltoall(self, data: Array, send_counts: Sequence[int], out: Array, recv_counts: Sequence[int]) -> None:
        """Give slice r of `data` to rank r; put what comes from rank r in slice r of `out`."""
        ...

    def reduce_scatter(self, data: Array, out: Array, counts: Sequence[int], op: ReduceOp) -> None:
        """Reduce `data` over the ranks and keep slice `rank` of it (``counts[rank]`` elements) in `out`."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called it."""
        ...

    def duplicate(self) -> Collectives:
        """Collectives over the same ranks that may run at the same time as these. Collective."""
        ...

    def close(self) -> None:
        """Release what the collectives hold. Local."""
        ...
