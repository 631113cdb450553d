"""The signals by which a user ends a job: what handles them while it runs."""

from __future__ import annotations

import contextlib
import os
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


def outlive_terminal() -> None:
    """Let this process, forked from hvdliterun, end by none of these signals, and keep nobody waiting for its output."""
    os.setsid()  # Ctrl-C on the terminal must not end it
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # who reads hvdliterun's output need not wait for this process
        os.dup2(null, descriptor)
