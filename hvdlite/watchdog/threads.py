"""Finds out whether any thread of the program may still do something, or whether all of them wait."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection
from types import CodeType

_calls_that_wait: set[CodeType] = set()


def waits_in(code: CodeType) -> None:
    """Declare that a thread whose innermost frame runs `code` waits for threads of a framework.

    Adapters call this if their framework calls hvdlite from its own threads. A thread of the framework that waits for other
    ranks then counts as working for a thread that is inside of `code`.
    """
    _calls_that_wait.add(code)


class Threads:
    """The living threads that have used an object.

    The class keeps the threads themselves, because the number of a thread is used again when the thread has ended. Threads that
    Python did not start, such as those of a framework, count as ended.
    """

    def __init__(self) -> None:
        self._known: dict[int, threading.Thread | None] = {}
        self._noted = threading.local()  # a thread-local value ends with its thread; a thread number does not

    def add(self) -> None:
        """Note the calling thread."""
        if not hasattr(self._noted, "here"):
            self._noted.here = True
            number = threading.get_ident()
            # Not current_thread(): that would enter a framework's thread in Python's list of threads for ever.
            found = next((each for each in threading.enumerate() if each.ident == number), None)
            self._known[number] = None if isinstance(found, threading._DummyThread) else found

    def leave_out(self) -> None:
        """Never note the calling thread: another thread waits for everything that it does."""
        self._noted.here = True

    def are_all_among(self, waiting: Collection[int]) -> bool:
        """Say whether all noted threads that are alive wait.

        A thread waits if its number is in `waiting`, or if it is in a call of `waits_in` and a framework's thread is in
        `waiting`.
        """
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
