"""Knows which threads of the program may still do something, and which only wait."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection
from types import CodeType

_calls_that_wait: set[CodeType] = set()


def waits_in(code: CodeType) -> None:
    """Declare that a thread whose innermost frame runs `code` waits for threads of a framework.

    Adapters of frameworks that call hvdlite from threads of their own use this. Each such thread that waits for other ranks
    then counts as working for one thread that is inside of the call.
    """
    _calls_that_wait.add(code)


class Threads:
    """The threads that have used hvdlite.

    A thread's number is used again when the thread has ended, so the threads themselves are kept. Threads that Python did not
    start (a framework's own threads) count as ended.
    """

    def __init__(self) -> None:
        self._known: dict[int, threading.Thread | None] = {}
        self._noted = threading.local()  # it ends with its thread; the thread's number does not

    def add(self) -> None:
        """Note the calling thread."""
        if not hasattr(self._noted, "here"):
            self._noted.here = True
            number = threading.get_ident()
            # Not current_thread(): that would enter a framework's thread in Python's list for good.
            found = next((each for each in threading.enumerate() if each.ident == number), None)
            self._known[number] = None if isinstance(found, threading._DummyThread) else found

    def leave_out(self) -> None:
        """Never note the calling thread, because another thread waits for everything that it does."""
        self._noted.here = True

    def are_all_among(self, waiting: Collection[int]) -> bool:
        """Return whether all live threads are among `waiting` (thread numbers), or a framework's thread waits for them."""
        others = [
            number
            for number, thread in list(self._known.items())
            if number not in waiting and thread is not None and thread.is_alive()
        ]
        if not others:
            return True
        if not _calls_that_wait or len(others) > sum(self._known.get(number) is None for number in waiting):
            return False
        frames = sys._current_frames()
        return all(number in frames and frames[number].f_code in _calls_that_wait for number in others)
