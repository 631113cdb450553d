"""Calls into libraries that may never come back, made from a thread that can be left behind."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class AbandonableCall(Generic[T]):
    """A call that is under way in a thread of its own.

    Args:
        function: What to call.
        name: Of the thread.
    """

    def __init__(self, function: Callable[[], T], name: str) -> None:
        self._function = function
        self._result: list[T] = []
        self._error: BaseException | None = None
        context = contextvars.copy_context()
        # A daemon: if the call never returns, the process can end nevertheless.
        self._thread = threading.Thread(target=context.run, args=(self._run,), name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result.append(self._function())
        except BaseException as error:  # raised again by `result`
            self._error = error

    def is_over(self, seconds: float) -> bool:
        """Whether it has come to an end, after waiting for that for so long at most."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> T:
        """What the call returned.

        Raises:
            Exception: What the call raised.
        """
        if self._error is not None:
            raise self._error
        return self._result[0]
