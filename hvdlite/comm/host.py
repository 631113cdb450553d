"""The ranks of one host: they share memory, and wait for each other at barriers ("meetings") in that memory.

The ranks meet by counters. A rank adds one to its own counter, and waits until the counters of the others have reached the same
number. After a meeting a rank sees what the others wrote before it. This relies on x86, which keeps the order of writes. On
other processors the ranks meet by messages, and the MPI library takes care of the order.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

import numpy as np

from hvdlite.algorithms.barrier import dissemination_barrier
from hvdlite.comm.naps import LONGEST_NAP, OFFERS_SECONDS, wait_until
from hvdlite.comm.shared_memory import PAGE, share
from hvdlite.errors import HvdliteError
from hvdlite.protocols import Array, Transport
from hvdlite.ranks.memory_ways import ORDERED
from hvdlite.ranks.own_core import yield_core

_LINE = 8
"""The number of int64 in a cache line. Each rank's counter has a cache line of its own."""
_SPINS = 500
"""How often a waiting rank looks before it offers its core to others, if each rank of the host has a core. A look takes about
0.05 µs."""
PATIENT, VERY_PATIENT = LONGEST_NAP, 5e-3
"""The longest nap inside of `Host.patiently`, in seconds."""


def _let_threads_run() -> None:
    time.sleep(0)


class Host:
    """The ranks of a group that are on this host.

    Args:
        transport: A transport over these ranks, for this object alone.

    Attributes:
        rank: The number of this rank among them.
        size: The number of these ranks.

    Raises:
        SharedMemoryError: The ranks cannot share memory. All of them raise it.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._stopped: HvdliteError | None = None
        self._patience = 0.0
        self.rank = transport.rank
        self.size = transport.size
        self._count = 0
        self._others: list[int] = []
        self._spins = 0
        self._offer: Callable[[], None] = yield_core
        if self.size > 1:
            numbers = share(transport, 8 * _LINE * (self.size + 1)).view(np.int64)
            self._board = memoryview(numbers)  # type: ignore[arg-type]  # faster to index than NumPy
            self._mine = self.rank * _LINE
            self._others = [rank * _LINE for rank in range(self.size) if rank != self.rank]
            self._spins = self._choose_spins(numbers)
        self._meet_by_messages = self.size > 1 and not ORDERED

    def _choose_spins(self, numbers: Array) -> int:
        """Return how often a waiting rank looks before it offers its core: 0 if another rank may need that core."""
        cores = len(os.sched_getaffinity(0))
        numbers[self.rank * _LINE + 1] = os.getpid()
        dissemination_barrier(self._transport)
        processes = {int(numbers[rank * _LINE + 1]) for rank in range(self.size)}
        threads = len(processes) < self.size  # some ranks are threads of one interpreter and share its lock
        if threads:
            self._offer = _let_threads_run
        return 0 if threads or cores < self.size else _SPINS

    def allocate(self, nbytes: int) -> list[Array]:
        """Allocate memory that all ranks of the host see. All of them call this.

        Args:
            nbytes: The number of bytes for each rank, the same on all ranks.

        Returns:
            For each rank its memory: uint8 zeros of shape ``(nbytes,)``, which begin at a page.

        Raises:
            SharedMemoryError: The memory cannot be shared. All ranks raise it.
        """
        stride = -(-nbytes // PAGE) * PAGE
        memory = self.allocate_together(stride * self.size)
        return [memory[rank * stride : rank * stride + nbytes] for rank in range(self.size)]

    def allocate_together(self, nbytes: int) -> Array:
        """Allocate one array for all ranks of the host: uint8 zeros of shape ``(nbytes,)``. All of them call this.

        Raises:
            SharedMemoryError: The memory cannot be shared. All ranks raise it.
        """
        return np.zeros(nbytes, np.uint8) if self.size == 1 else share(self._transport, nbytes)

    @contextlib.contextmanager
    def patiently(self, longest_nap: float) -> Iterator[None]:
        """Return a context manager in which waits sleep at once, without keeping the core.

        Args:
            longest_nap: The longest nap in seconds: `PATIENT` if another thread of this rank computes meanwhile, `VERY_PATIENT`
                if many threads wait and the other ranks may take long.
        """
        before, self._patience = self._patience, longest_nap
        try:
            yield
        finally:
            self._patience = before

    def meet(self) -> None:
        """Return when every rank of the host has called this."""
        if self._meet_by_messages:
            dissemination_barrier(self._transport)
            return
        self._count = count = self._count + 1
        if self._others:
            board = self._board
            board[self._mine] = count
            for other in self._others:
                if board[other] < count:
                    self._wait(other, count)

    def _wait(self, other: int, count: int) -> None:
        board = self._board
        if not self._patience:
            for _ in range(self._spins):
                if board[other] >= count:
                    return
        self.wait_until(lambda: board[other] >= count)

    @property
    def keeps_order(self) -> bool:
        """Whether a rank sees the others' writes to shared memory in the order in which they were made."""
        return ORDERED

    def wait_briefly(self, done: Callable[[], bool], until: float) -> bool:
        """Call `done` a few times, and then until the time `until` of `time.perf_counter`. Return whether it returned True."""
        for _ in range(self._spins):
            if done():
                return True
        while True:
            self._offer()
            if done():
                return True
            if time.perf_counter() >= until:
                return False

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Call `done` until it returns True, without keeping a core busy for long.

        Raises:
            HvdliteError: `stop` was called with this error, or a rank has left.
        """
        offers = 0.0 if self._patience else OFFERS_SECONDS
        wait_until(done, self._check, self._offer, offers, self._patience or LONGEST_NAP)

    def _check(self) -> None:
        if self._stopped is not None:
            raise type(self._stopped)(str(self._stopped))
        # `poll` raises if the transport knows that a rank has left. It never returns a message: nobody posts any here.
        self._transport.poll()

    def stop(self, error: HvdliteError | None = None) -> None:
        """Fail every wait on this object, now and later, in every thread, with `error` (by default: hvdlite was shut down)."""
        ended = "the ranks of this host do not meet any more: hvdlite has been shut down."
        self._stopped = self._stopped or error or HvdliteError(ended)

    def close(self) -> None:
        """Close the transport. This does not wait for other ranks."""
        self._transport.close()
