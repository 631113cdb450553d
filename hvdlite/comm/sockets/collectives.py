"""Collectives of ranks on different hosts: large data over connections of our own, the rest as before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from hvdlite.algorithms.slices import slices, split
from hvdlite.comm.interrupt import Interrupt
from hvdlite.comm.sockets.endpoint import SocketEndpoint
from hvdlite.comm.sockets.links import RankConnections
from hvdlite.comm.sockets.meeting import meet
from hvdlite.errors import CommunicationError, HvdliteError
from hvdlite.protocols import Array, Collectives, ReduceOp, numpy_combine
from hvdlite.ranks.log import tell

LARGE_BYTES = 2**19
"""From so many bytes on, data goes by sockets. Below, the messages of MPI are faster."""
_SLICE_BYTES = 2**19
"""So much of a slice is exchanged at a time. Each message costs some 20 µs of Python."""
Send = Callable[[int, Array], None]

MOST_RANKS = 32
"""The largest group that has connections: each two of its ranks have one."""


class SocketCollectives:
    """`Collectives` of ranks on different hosts. All ranks make one, with equal settings.

    Each rank sends every other rank its slice at once, the farther ones later::

        reduce-scatter   in step s, rank r sends slice r + s to that rank, and adds what rank r - s has of slice r
        allgather        in step s, rank r sends slice r to rank r + s

    This takes 2(P-1)/P·n bytes each way, the least possible. One rank sums a slice, always in the same order, so all ranks and
    all runs have the same bits. A chunk is summed while the next one is under way.

    Args:
        flat: Collectives of the same ranks, which this object owns: for small data, and to connect.
        endpoint: This rank's.
        required: Whether it is an error if the ranks cannot connect. If not, `flat` does everything then.
        interrupt: Ends all waits; None if nothing ever does.
        large_bytes: From so many bytes on, data goes by sockets; None for `LARGE_BYTES`.
    """

    def __init__(
        self,
        flat: Collectives,
        endpoint: SocketEndpoint,
        required: bool = False,
        interrupt: Interrupt | None = None,
        large_bytes: int | None = None,
    ) -> None:
        self._flat, self._endpoint, self._required, self._interrupt = flat, endpoint, required, interrupt
        self._large_bytes = LARGE_BYTES if large_bytes is None else large_bytes
        self.rank, self.size = flat.rank, flat.size
        self._links: RankConnections | None = None
        self._does_without = False
        self._stopped: HvdliteError | None = None
        ranks = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._to, self._from = ranks, ranks[::-1]
        if interrupt is not None:
            interrupt.also(self.stop)

    # ---- the choice ----

    def _for(self, nbytes: int) -> RankConnections | None:
        """Return the connections for an exchange of so many bytes, the same on all ranks; None if it does without them."""
        if nbytes < self._large_bytes or self._does_without:
            return None
        if self._links is None:
            self._connect()
        return self._links

    def _connect(self) -> None:
        self._check()
        found = meet(self._flat, self._endpoint, self._check)
        if not isinstance(found, str):
            self._links = RankConnections(found, self._check)
            if self._stopped is not None:
                self._links.stop(self._stopped)
            return
        if self._required:
            raise CommunicationError(
                f"HVDLITE_BETWEEN_HOSTS=sockets: the hosts cannot connect to each other ({found}). Open ports between them, "
                "which HVDLITE_PORTS=from-to chooses; or name a network that they share by --network-interface; or use mpi."
            )
        if not self._endpoint.card.problem and self.rank == 0:
            tell(
                "hosts",
                f"hvdlite: large data between hosts goes by MPI: the hosts cannot connect to each other ({found}). To let "
                "them, open ports, which HVDLITE_PORTS=from-to chooses. HVDLITE_BETWEEN_HOSTS=mpi says so in advance.",
                self.rank,
            )
        self._endpoint.give_up(found)
        self._does_without = True

    def _check(self) -> None:
        if self._stopped is not None:
            raise type(self._stopped)(str(self._stopped))
        if self._interrupt is not None:
            self._interrupt.check()

    # ---- the collectives ----

    def allreduce(self, data: Array, op: ReduceOp, algorithm: str = "auto") -> None:
        links = self._for(data.nbytes) if algorithm == "auto" else None
        if links is None:
            self._flat.allreduce(data, op, algorithm)
            return
        length = max(1, _SLICE_BYTES // data.itemsize) * self.size
        cuts = [*range(0, data.size, length), data.size]
        blocks = [self._parts(data[lo:hi], split(hi - lo, self.size)) for lo, hi in pairwise(cuts)]

        def body(send: Send) -> None:
            # A block is reduced while the sums of the one before travel back, and are still in the cache.
            self._give(send, blocks[0])
            for number, parts in enumerate(blocks):
                if number + 1 < len(blocks):
                    self._give(send, blocks[number + 1])
                self._combine(links, parts[self.rank], op)
                self._show(send, parts[self.rank])
                if number:
                    self._take(links, blocks[number - 1])
            self._take(links, blocks[-1])

        links.exchange(body)

    def reduce_scatter(self, data: Array, out: Array, counts: Sequence[int], op: ReduceOp) -> None:
        links = self._for(data.nbytes)
        if links is None:
            self._flat.reduce_scatter(data, out, counts, op)
            return
        parts = self._parts(data, counts)
        out[:] = parts[self.rank]

        def body(send: Send) -> None:
            self._give(send, parts)
            self._combine(links, out, op)

        links.exchange(body)

    def allgather(self, data: Array, out: Array, counts: Sequence[int]) -> None:
        links = self._for(out.nbytes)
        if links is None:
            self._flat.allgather(data, out, counts)
            return
        parts = self._parts(out, counts)
        parts[self.rank][:] = data

        def body(send: Send) -> None:
            self._show(send, parts[self.rank])
            self._take(links, parts)

        links.exchange(body)

    def broadcast(self, data: Array, root: int) -> None:
        """Send each rank a slice, which it then sends to the others. See `Collectives`."""
        links = self._for(data.nbytes)
        if links is None:
            self._flat.broadcast(data, root)
            return
        parts = self._parts(data, split(data.size, self.size))

        def body(send: Send) -> None:
            if self.rank == root:
                self._give(send, parts)
                self._show(send, parts[root])
                return
            links.receive_into(root, parts[self.rank])
            for rank in self._to:
                if rank != root:
                    send(rank, parts[self.rank])
            self._take(links, parts)

        links.exchange(body)

    def alltoall(self, data: Array, send_counts: Sequence[int], out: Array, recv_counts: Sequence[int]) -> None:
        most = np.array([max(data.nbytes, out.nbytes)], np.int64)  # it differs between ranks
        self._flat.allreduce(most, ReduceOp.MAX)
        links = self._for(int(most[0]))
        if links is None:
            self._flat.alltoall(data, send_counts, out, recv_counts)
            return
        sends, receives = self._parts(data, send_counts), self._parts(out, recv_counts)
        receives[self.rank][:] = sends[self.rank]

        def body(send: Send) -> None:
            self._give(send, sends)
            self._take(links, receives)

        links.exchange(body)

    def _parts(self, data: Array, counts: Sequence[int]) -> list[Array]:
        return [data[part] for part in slices(counts)]

    def _give(self, send: Send, parts: Sequence[Array]) -> None:
        """Send each other rank its slice."""
        for rank in self._to:
            send(rank, parts[rank])

    def _show(self, send: Send, own: Array) -> None:
        """Send all other ranks this rank's slice."""
        for rank in self._to:
            send(rank, own)

    def _take(self, links: RankConnections, parts: Sequence[Array]) -> None:
        """Receive a slice of each other rank."""
        for rank in self._from:
            links.receive_into(rank, parts[rank])

    def _combine(self, links: RankConnections, own: Array, op: ReduceOp) -> None:
        """Combine this rank's slice with what the others have of it."""
        combine = numpy_combine(op)
        for rank in self._from:
            links.combine_into(rank, own, combine)

    def start_sum(self, data: Array) -> Callable[[], bool]:
        return self._flat.start_sum(data)

    def barrier(self) -> None:
        self._flat.barrier()

    def duplicate(self) -> SocketCollectives:
        again = self._flat.duplicate()
        return SocketCollectives(again, self._endpoint, self._required, self._interrupt, self._large_bytes)

    def stop(self, error: HvdliteError) -> None:
        self._stopped = self._stopped or error
        if self._links is not None:
            self._links.stop(error)
        self._flat.stop(error)

    def close(self) -> None:
        if self._links is not None:
            self._links.close()
        self._flat.close()
