"""How a thread waits for other ranks without keeping a core busy for long."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

OFFERS_SECONDS = 2e-3
"""How long it offers its core between looks before it sleeps. A sleep lasts 0.1 ms longer than is asked for, which makes
this rank the late one at the next meeting, and the other one sleep: the blocks of a large tensor would all take so long."""
FIRST_NAP, LONGEST_NAP = 20e-6, 200e-6
_NAP_GROWTH = 1.2
"""So a nap is a fifth of what has been waited, at most, and so is the time lost when the others come."""


def offer_core() -> None:
    """Let another process, or another thread of this one, run first."""
    os.sched_yield()
    time.sleep(0)


def wait_until(
    done: Callable[[], bool],
    check: Callable[[], object],
    offer: Callable[[], None] = offer_core,
    offers_seconds: float = OFFERS_SECONDS,
    longest_nap: float = LONGEST_NAP,
) -> None:
    """Return when `done` says so, which is asked again and again.

    Args:
        done: Says whether the wait is over.
        check: Called after each nap; it raises if the wait can never end.
        offer: Called between two looks in the first `offers_seconds`.
        offers_seconds: How long to look without a nap, in seconds.
        longest_nap: Seconds.

    Raises:
        Exception: What `done` or `check` raised.
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
