"""How a thread waits for other ranks without keeping a core busy for long."""

from __future__ import annotations

import time
from collections.abc import Callable

from hvdlite.ranks.own_core import yield_core

OFFERS_SECONDS = 2e-3
"""How long a waiting thread offers its core to others before it sleeps, in seconds. A sleep lasts 0.1 ms longer than was asked
for. So a rank that sleeps is late at the next meeting and makes the other rank sleep there; each block of a large tensor would
take that long."""
FIRST_NAP, LONGEST_NAP = 20e-6, 200e-6
_NAP_GROWTH = 1.2
"""The factor from one nap to the next. With it, a nap lasts at most a fifth of the whole wait, and so does the time that a rank
loses when the others arrive during a nap."""


def offer_core() -> None:
    """Let another process, or another thread of this one, run first."""
    yield_core()
    time.sleep(0)


def wait_until(
    done: Callable[[], bool],
    check: Callable[[], object],
    offer: Callable[[], None] = offer_core,
    offers_seconds: float = OFFERS_SECONDS,
    longest_nap: float = LONGEST_NAP,
) -> None:
    """Call `done` again and again, and return when it returns True.

    Args:
        done: A function that says whether the wait is over.
        check: A function that raises if the wait can never end. It is called after each nap.
        offer: A function that is called between two calls of `done` in the first `offers_seconds`.
        offers_seconds: The time without naps at the beginning, in seconds.
        longest_nap: The longest nap, in seconds.

    Raises:
        Exception: `done` or `check` has raised it.
    """
    if offers_seconds:
        until = time.monotonic() + offers_seconds
        while time.monotonic() < until:
            if done():
                return
            offer()
    nap = FIRST_NAP
    while not done():
        time.sleep(nap)
        nap = min(_NAP_GROWTH * nap, longest_nap)
        check()
