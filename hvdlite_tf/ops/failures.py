"""Exceptions of calls of Python from TensorFlow, on their way to the program.

A graph tells the program the text of an exception and not its class. So the last exceptions are remembered here. A package may
set `shown` to give the program other exceptions, as `hvdlite_tf.horovod` does.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator

_MOST = 64
_recent: deque[tuple[type[Exception], str]] = deque(maxlen=_MOST)
"""The classes and texts of the last exceptions. The exceptions themselves would keep the tensors of their frames alive."""

shown: list[Callable[[Exception], Exception]] = []
"""Functions that return the exception that a program gets from a call of Python instead of the given one."""


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Remember an exception that leaves the body, for `original`."""
    try:
        yield
    except Exception as error:
        _recent.append((type(error), str(error)))
        raise


@contextlib.contextmanager
def as_shown() -> Iterator[None]:
    """Let an exception that leaves the body be what `shown` makes of it."""
    try:
        yield
    except Exception as error:
        found: Exception = error
        for show in shown:
            found = show(found)
        if found is error:
            raise
        raise found.with_traceback(error.__traceback__) from None


def original(text: str) -> tuple[type[Exception], str] | None:
    """Return the class and the text of the latest exception whose text is in this text of TensorFlow; None if there is none."""
    return next(((cls, said) for cls, said in reversed(_recent) if said and said in text), None)
