"""The signal handlers of a program are switched off once the program is over."""

from __future__ import annotations

import signal


def silence_handlers() -> None:
    """Remove the program's signal handlers: one that raises would interrupt the steps that end the process in order.

    SIGTERM, SIGINT and SIGHUP get their default action, and end the process. Other signals that had a handler are ignored.
    """
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            ends = number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            signal.signal(number, signal.SIG_DFL if ends else signal.SIG_IGN)
