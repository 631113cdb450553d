"""The ranks of one host find out whether all of them want the same thing now, and show each other a few bytes with it.

Nobody has to come: a rank that has waited for a moment withdraws. The ranks number their turns. In a turn a rank shows what it
wants, and its data, in shared memory. When it sees that all ranks show the same in the same turn, it is bound to it (it
"goes"); otherwise it withdraws. It does one of the two, once, and the ranks agree if all have gone::

    rank 0   show 7 │ sees all: go 7 │ sees all go: read the data
    rank 1       show 7 │ sees all: go 7 │ sees all go: read the data
    rank 0   show 8 │ sees nobody: withdraw 8
    rank 1                                       sees that 8 was withdrawn: withdraws too

So every turn ends alike on all ranks, although a rank waits only for those that have shown something already, and are about to
decide. This is a unanimous two-phase commit without a coordinator (see "nonblocking commit" in Skeen, SIGMOD 1981). Each number
has one writer and only grows, so how the latest turn has ended can be read from the memory at any time. The protocol relies on
x86, which keeps the order of writes, and that of reads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from hvdlite.comm.host import Host
from hvdlite.protocols import Array

SHOWN_BYTES = 2**12
"""The largest array that a rank can show."""
_LINE_BYTES = 64
_SHOWN, _GONE, _WITHDRAWN, _WHAT = range(4)
"""The places of a rank's numbers in its cache line: its latest turn; the latest turn in which it has gone; the latest in which
it has withdrawn; and what it shows, three numbers."""

_VIEWS = 256

What = tuple[int, int, int]
"""What a rank wants, as three numbers of 64 bits."""


class Ballot:
    """One rank's part. One thread at a time may use it.

    Args:
        host: The ranks. All of them make a `Ballot` at the same time; nobody else needs to come.
        seconds: How long a rank waits for others before it withdraws.
        patience: A context manager that owns a wait for a rank that has shown something, and does not decide.

    Raises:
        SharedMemoryError: The memory cannot be shared. All ranks raise it.
    """

    def __init__(self, host: Host, seconds: float, patience: AbstractContextManager[object]) -> None:
        self._host, self._seconds, self._patience = host, seconds, patience
        memory = host.allocate(_LINE_BYTES + 2 * SHOWN_BYTES)
        lines = [memoryview(piece[:_LINE_BYTES].view(np.int64)) for piece in memory]  # type: ignore[arg-type]  # fast to index
        self._mine = lines.pop(host.rank)
        self._others = lines
        starts = [_LINE_BYTES, _LINE_BYTES + SHOWN_BYTES]
        self._slots = [[piece[start : start + SHOWN_BYTES] for piece in memory] for start in starts]
        self._views: dict[tuple[int, np.dtype[Any], int], list[Array]] = {}
        """Beginnings of slots as arrays, which are slow to make."""
        self._read = [0, 0]
        """For each slot, the latest turn in which others may have read it."""

    @property
    def turn(self) -> int:
        """The latest turn in which this rank has shown something."""
        return self._mine[_SHOWN]

    def agree(self, what: What, data: Array) -> list[Array] | None:
        """Show something, and find out whether all ranks show the same now.

        Args:
            what: What this rank wants. If all ranks show the same, their data have the same dtype and size.
            data: An array of shape ``(n,)`` with at most `SHOWN_BYTES`.

        Returns:
            The data of all ranks, in the order of the ranks, until the next call; for this rank, `data` itself. None if the
            ranks do not agree; it is None on all ranks then.

        Raises:
            HvdliteError: A rank has left before it has decided.
        """
        mine, others = self._mine, self._others
        last = mine[_SHOWN]
        newest = max([other[_SHOWN] for other in others])
        turn = last + 1
        if newest > last:  # others are in a turn that this rank has not had
            turn = newest
            for other in others:
                if other[_WITHDRAWN] >= newest:
                    if _what(other) == what:  # it waited, and does not wait any more
                        mine[_WITHDRAWN] = newest
                        mine[_SHOWN] = newest
                        return None
                    turn = newest + 1
        read = self._read[turn & 1]
        for other in others:
            if read and other[_SHOWN] <= read:  # it may still read what this rank showed then
                return None
        shown = self._shown(turn, data)
        shown[self._host.rank][:] = data
        mine[_WHAT], mine[_WHAT + 1], mine[_WHAT + 2] = what
        mine[_SHOWN] = turn  # comes last: who sees it sees the rest
        if not self._all_show(turn, what):
            mine[_WITHDRAWN] = turn
            return None
        self._read[turn & 1] = turn
        mine[_GONE] = turn
        for other in others:
            if other[_GONE] < turn and not self._host.wait_briefly(lambda: _has_decided(other, turn), 0.0):  # noqa: B023
                with self._patience:
                    self._host.wait_until(lambda: _has_decided(other, turn))  # noqa: B023  # it is called here only
        if not self._all_have_gone(turn):
            return None
        shown[self._host.rank] = data
        return shown

    def _shown(self, turn: int, data: Array) -> list[Array]:
        """Return what the ranks show in this turn, for data like `data`: a new list of shared arrays."""
        key = turn & 1, data.dtype, data.size
        views = self._views.get(key)
        if views is None:
            if len(self._views) == _VIEWS:
                self._views.clear()
            views = self._views[key] = [slot[: data.nbytes].view(data.dtype) for slot in self._slots[turn & 1]]
        return views.copy()

    def settle(self) -> bool | None:
        """Withdraw from the latest turn unless this rank is bound to it. It is for a call of `agree` that has raised an error.

        Returns:
            Whether the ranks have agreed; None if this rank is bound, and a rank has not decided.
        """
        mine = self._mine
        turn = mine[_SHOWN]
        if mine[_GONE] < turn:
            mine[_WITHDRAWN] = turn
            return False
        for other in self._others:
            until = time.perf_counter() + self._seconds
            if not self._host.wait_briefly(lambda: _has_decided(other, turn), until):  # noqa: B023
                return None
        return self._all_have_gone(turn)

    def _all_show(self, turn: int, what: What) -> bool:
        """Say whether all ranks show the same in this turn; wait for them for a moment."""
        until = 0.0
        for other in self._others:
            if other[_SHOWN] < turn:
                until = until or time.perf_counter() + self._seconds
                if not self._host.wait_briefly(lambda: other[_SHOWN] >= turn, until):  # noqa: B023  # it is called here only
                    return False
            if other[_SHOWN] != turn or other[_WITHDRAWN] >= turn or _what(other) != what:
                return False
        return True

    def _all_have_gone(self, turn: int) -> bool:
        """Say whether all ranks have gone in this turn, in which each has decided."""
        return all([other[_GONE] >= turn for other in self._others])


def _what(line: Sequence[int]) -> What:
    return line[_WHAT], line[_WHAT + 1], line[_WHAT + 2]


def _has_decided(line: Sequence[int], turn: int) -> bool:
    # A later turn is read before `_GONE`, for it is written after it: so one that has gone is never taken for one that has not.
    later = line[_WITHDRAWN] >= turn or line[_SHOWN] > turn
    return line[_GONE] >= turn or later
