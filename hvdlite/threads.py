"""Which threads of the program may still do something, and which only wait."""

from __future__ import annotations

import threading
from collections.abc import Container


class Threads:
    """Threads that have used something, as far as they are still alive.

    A thread's number is used again when the thread has ended, so the threads themselves are kept. Those that Python did not
    start and has not met (a framework's own) count as ended.
    """

    def __init__(self) -> None:
        self._known: dict[int, threading.Thread | None] = {}
        self._noted = threading.local()  # which ends with its thread, as a number does not

    def add(self) -> None:
        """Note the calling thread."""
        if not hasattr(self._noted, "here"):
            self._noted.here = True
            number = threading.get_ident()
            # Not current_thread(): that would enter a framework's thread in Python's list for good.
            self._known[number] = next((each for each in threading.enumerate() if each.ident == number), None)

    def are_all_among(self, waiting: Container[int]) -> bool:
        """Whether all that are alive are `waiting` (thread numbers)."""
        return all(
            number in waiting
            for number, thread in list(self._known.items())
            if thread is not None and thread.is_alive()
        )
