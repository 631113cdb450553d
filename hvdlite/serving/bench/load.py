"""Sends by the clock (open loop), or when the last answer is there (closed loop)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import numpy as np
import numpy.typing as npt

from hvdlite.serving.bench.client import Target
from hvdlite.serving.bench.results import Results
from hvdlite.serving.bench.sender import Sender

AGAIN_AFTER = 0.1  # seconds until a client of a closed loop tries again, if it was not answered
SHOW_EVERY = 1.0  # seconds
SOON = 0.01  # seconds

Show = Callable[[str], None]


async def closed_loop(to: Target, clients: int, seconds: float, warm_up: float, timeout: float, show: Show) -> Results:
    """Let clients send one request after another, each as soon as its last answer is there.

    Args:
        to: Where they send.
        clients: How many there are.
        seconds: How long the measurement takes.
        warm_up: For how long before that answers do not count, in seconds.
        timeout: A request that has no answer by then is given up, in seconds.
        show: Shows how it goes, once a second.

    Raises:
        LaunchError: No server is there at the beginning.
    """
    results = Results(f"{clients} client{'s' * (clients > 1)}", "clients", clients)
    loop = asyncio.get_running_loop()
    begin = time.perf_counter() + warm_up
    end = begin + seconds

    def over(due: float, outcome: int | str, now: float) -> None:
        if begin <= now < end:
            results.add(outcome, now - due)
        if isinstance(outcome, int):
            sender.submit(now)
        else:
            loop.call_later(AGAIN_AFTER, lambda: sender.submit(time.perf_counter()))

    async with Sender(to, clients, timeout, over) as sender:
        for _ in range(clients):
            sender.submit(time.perf_counter())
        await asyncio.sleep(begin - time.perf_counter())
        async with _measured(results, show):
            await asyncio.sleep(end - time.perf_counter())
    return results


async def open_loop(
    to: Target, times: npt.NDArray[np.float64], load: str, connections: int, timeout: float, show: Show
) -> Results:
    """Send requests at given times, whether or not others were answered.

    A latency counts from when the request was due. So a server that stalls is charged for every request that comes meanwhile:
    there is no coordinated omission (Tene, "How NOT to Measure Latency", 2013).

    Args:
        to: Where requests go.
        times: When, in seconds from the beginning, in rising order. Shape (n,), n ≥ 1.
        load: What this is, in words.
        connections: The most connections at a time. A request for which none is free waits for one.
        timeout: A request that has no answer by then is given up, in seconds.
        show: Shows how it goes, once a second.

    Raises:
        LaunchError: No server is there at the beginning.
    """
    results = Results(load, "requests/s", len(times) / max(float(times[-1]), SOON))

    def over(due: float, outcome: int | str, now: float) -> None:
        results.add(outcome, now - due)

    async with Sender(to, connections, timeout, over) as sender, _measured(results, show):
        for due in (time.perf_counter() + SOON + times).tolist():
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            sender.submit(due)
        while not sender.is_idle:
            await asyncio.sleep(SOON)
        results.lateness = sender.lateness
    return results


@contextlib.asynccontextmanager
async def _measured(results: Results, show: Show) -> AsyncIterator[None]:
    """Measure the time and this program's share of a core, and show how it goes."""
    begin, cpu = time.perf_counter(), time.process_time()

    def stop_the_clock() -> None:
        results.seconds = time.perf_counter() - begin
        results.cpu = (time.process_time() - cpu) / max(results.seconds, 1e-9)

    async def tell() -> None:
        while True:
            await asyncio.sleep(SHOW_EVERY)
            stop_the_clock()
            show(results.line())

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()
        stop_the_clock()
