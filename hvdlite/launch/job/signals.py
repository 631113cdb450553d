"""The signals by which a user ends a job: what handles them while it runs."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Return a context manager in which `handler` handles these signals, if the main thread enters it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in ENDS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
