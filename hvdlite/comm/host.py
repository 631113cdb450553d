"""The ranks of one host: memory that all of them see, and a place to wait for each other.

They meet by counters: a rank adds one to its own and waits until the others' have come as far. What a rank wrote before a
meeting, the others see after it. The memory of x86 keeps the order of writes; on other processors ranks meet by messages,
whose library knows what their memory needs.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterator

import numpy as np

from hvdlite.algorithms.barrier import dissemination_barrier
from hvdlite.comm.naps import LONGEST_NAP, OFFERS_SECONDS, wait_until
from hvdlite.comm.shared_memory import PAGE, share
from hvdlite.errors import HvdliteError
from hvdlite.protocols import Array, Transport

_LINE = 8
"""int64 per cache line, so that no two ranks write to the same one."""
_SPINS = 500
"""Looks (of about 0.05 µs) before a waiting rank offers its core to others, if each rank of the host has a core."""
PATIENT, VERY_PATIENT = LONGEST_NAP, 5e-3
_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")


def _let_threads_run() -> None:
    time.sleep(0)


class Host:
    """The ranks of a group that are on this host.

    Args:
        transport: Over them, for the use of this object alone.

    Raises:
        SharedMemoryError: They cannot share memory. Raised on all of them.
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
        self._offer: Callable[[], None] = os.sched_yield
        if self.size > 1:
            numbers = share(transport, 8 * _LINE * (self.size + 1)).view(np.int64)
            self._board = memoryview(numbers)  # type: ignore[arg-type]  # faster to index than NumPy
            self._mine = self.rank * _LINE
            self._others = [rank * _LINE for rank in range(self.size) if rank != self.rank]
            self._spins = self._choose_spins(numbers)
        self._meet_by_messages = self.size > 1 and not _ORDERED

    def _choose_spins(self, numbers: Array) -> int:
        """How long to look before giving the core away: not at all where a rank may need it to go on."""
        cores = len(os.sched_getaffinity(0))
        numbers[self.rank * _LINE + 1] = os.getpid()
        dissemination_barrier(self._transport)
        processes = {int(numbers[rank * _LINE + 1]) for rank in range(self.size)}
        threads = len(processes) < self.size  # share one interpreter, and its lock
        if threads:
            self._offer = _let_threads_run
        return 0 if threads or cores < self.size else _SPINS

    def allocate(self, nbytes: int) -> list[Array]:
        """Memory that all ranks of the host see. All of them call this.

        Args:
            nbytes: Bytes for each rank, the same on all.

        Returns:
            The piece of each rank: uint8, zeros, at the start of a page.

        Raises:
            SharedMemoryError: There is none. Raised on all of them.
        """
        stride = -(-nbytes // PAGE) * PAGE
        memory = self.allocate_together(stride * self.size)
        return [memory[rank * stride : rank * stride + nbytes] for rank in range(self.size)]

    def allocate_together(self, nbytes: int) -> Array:
        """`nbytes` bytes that all ranks of the host see: uint8, zeros. All of them call this.

        Raises:
            SharedMemoryError: There is none. Raised on all of them.
        """
        return np.zeros(nbytes, np.uint8) if self.size == 1 else share(self._transport, nbytes)

    @contextlib.contextmanager
    def patiently(self, longest_nap: float) -> Iterator[None]:
        """For a with statement: inside of it, sleep while waiting.

        Args:
            longest_nap: Seconds at a time: `PATIENT` if another thread of this rank has something to do, `VERY_PATIENT` if it
                may take the others long and many threads wait.
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
            for place in self._others:
                if board[place] < count:
                    self._wait(place, count)

    def _wait(self, place: int, count: int) -> None:
        board = self._board
        if not self._patience:
            for _ in range(self._spins):
                if board[place] >= count:
                    return
        self.wait_until(lambda: board[place] >= count)

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Return when `done` says so, which it is asked again and again, without keeping a core busy for long.

        Raises:
            HvdliteError: What `stop` was called with.
        """
        offers = 0.0 if self._patience else OFFERS_SECONDS
        wait_until(done, self._check, self._offer, offers, self._patience or LONGEST_NAP)

    def _check(self) -> None:
        if self._stopped is not None:
            raise type(self._stopped)(str(self._stopped))
        # Raises if it is known that a rank has left. (Nobody posts messages here.)
        self._transport.poll()

    def stop(self, error: HvdliteError | None = None) -> None:
        """Fail every wait here, of whatever thread, from now on, with `error` (by default: all is over)."""
        ended = "the ranks of this host do not meet any more: hvdlite has been shut down."
        self._stopped = self._stopped or error or HvdliteError(ended)

    def close(self) -> None:
        """Release the transport. Local."""
        self._transport.close()
