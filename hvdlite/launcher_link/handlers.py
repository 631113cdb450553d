"""The program's signal handlers, once it is over."""

from __future__ import annotations

import signal


def silence_handlers() -> None:
    """From now on no signal handler of the program's runs: one that raises would end what is done after it."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            ends = number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            signal.signal(number, signal.SIG_DFL if ends else signal.SIG_IGN)
