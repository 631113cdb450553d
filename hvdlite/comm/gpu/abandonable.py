"""Calls into libraries that may never return. A thread makes such a call, and the program can leave the thread behind."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class AbandonableCall(Generic[T]):
    """A call that is under way in a thread of its own; it is over at once where Python starts no threads any more, at exit.

    Args:
        function: The function to call.
        name: The name of the thread.
    """

    def __init__(self, function: Callable[[], T], name: str) -> None:
        self._function = function
        self._result: list[T] = []
        self._error: BaseException | None = None
        context = contextvars.copy_context()
        # The thread is a daemon: the process can end even if the call never returns.
        self._thread: threading.Thread | None = threading.Thread(
            target=context.run, args=(self._run,), name=name, daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # Python 3.12.0 to 3.12.2 start no thread while the interpreter ends
            self._thread = None
            context.run(self._run)

    def _run(self) -> None:
        try:
            self._result.append(self._function())
        except BaseException as error:  # raised again by `result`
            self._error = error

    def is_over(self, seconds: float) -> bool:
        """Wait for the end of the call, for at most `seconds`, and say whether the call has ended."""
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> T:
        """Return the result of the call, which has ended.

        Raises:
            Exception: The call has raised it.
        """
        if self._error is not None:
            raise self._error
        return self._result[0]
