"""`Interrupt` ends every wait of a rank when other ranks have failed, so that it can go on in a new group without them.

Nobody tells MPI of the rank that has failed, so MPI may wait for it for ever. A rank that is to go on after that is never in a
call of MPI that blocks: a transport with an `Interrupt` begins each call, and asks for its end again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakMethod

from hvdlite.errors import HvdliteError, PeerLeftError


class Interrupt:
    """The end of one world, which any thread may bring about. All transports of the world share it."""

    def __init__(self) -> None:
        self._text: str | None = None
        self._also: list[WeakMethod[Callable[[HvdliteError], None]]] = []

    def also(self, stop: Callable[[HvdliteError], None]) -> None:
        """Call `stop`, a method, with the error when the world is ended: it ends waits that do not call `check`.

        The object that has the method may go away before.
        """
        self._also = [each for each in self._also if each() is not None]
        self._also.append(WeakMethod(stop))
        if self._text is not None:
            stop(PeerLeftError(self._text))

    @property
    def is_set(self) -> bool:
        """Whether the world has been ended."""
        return self._text is not None

    def set(self, text: str) -> None:
        """End the world: every wait, now and later, in every thread, raises `PeerLeftError` with this text."""
        self._text = text
        for each in self._also:
            if (stop := each()) is not None:
                stop(PeerLeftError(text))

    def check(self) -> None:
        """Raise PeerLeftError if the world has been ended."""
        if self._text is not None:
            raise PeerLeftError(self._text)  # a new one each time: an error keeps the frames that it has passed
