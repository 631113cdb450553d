"""See whether ``hvdlite serve`` chooses the right time-out, on real servers with a model that is like a GPU's.

    python -m benchmarks.serving_slo loads 0.02 0.1 0.3     50 seconds for each load
    python -m benchmarks.serving_slo loads 0.6 0.9
    python -m benchmarks.serving_slo jump                   half a minute

*loads*: requests come at random (Poisson) at a share of what one replica can serve. One server chooses its time-out for a p99
of at most 50 ms. When it has watched the load for some seconds, its prediction and its compute for each request are compared
with what is measured, and with those of servers with fixed time-outs. A replica needs 5 ms, and 0.1 ms for each input of a
batch of up to 32.

*jump*: the load becomes ten times as high, from one moment to the next. The 99th percentile of each second is shown.

Latencies are those that the client sees, from when a request was due.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import sys
import time
import urllib.request
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from benchmarks.machine import machine
from benchmarks.report import aligned
from benchmarks.serving import FailedError, check, ours
from benchmarks.serving_models import SHAPES
from hvdlite.serving.bench import bodies
from hvdlite.serving.bench.client import Target, target
from hvdlite.serving.bench.schedule import poisson
from hvdlite.serving.bench.sender import Sender

MODEL, MAX_BATCH, BOUND = "gpu", 32, 0.05
CAPACITY = MAX_BATCH / (0.005 + 0.0001 * MAX_BATCH)
WAITS = (0, 5, 10, 20, 30, 40)  # ms
WATCH, MEASURED, SECONDS = 6.0, 24.0, 3.5  # near the capacity, the p99 of a few seconds is chance
BEFORE, JUMP, JUMP_BOUND = 0.08, 10, 0.03
CONNECTIONS = 500  # a server takes 1000, also of those who ask for its metrics
CHOSEN = "chosen"
SENT = bodies.random(SHAPES[MODEL], "float32", as_json=True)


async def send(to: Target, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Send requests at these times. Return when each was due, and its latency, in seconds."""
    found: list[tuple[float, float]] = []
    begin = time.perf_counter() + 0.01

    def over(due: float, outcome: int | str, now: float) -> None:
        if outcome != 200:
            raise FailedError(f"a request was answered {outcome}")
        found.append((due - begin, now - due))

    async with Sender(to, CONNECTIONS, 30.0, over) as sender:
        for due in (begin + times).tolist():
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            sender.submit(due)
        while not sender.is_idle:
            await asyncio.sleep(0.01)
    due, latency = np.array(found).T
    return due, latency


def metrics(url: str) -> dict[str, float]:
    """Read the figures of a server that have no labels."""
    with urllib.request.urlopen(url.replace("/v1/predict", "/metrics"), timeout=10) as answer:
        text = answer.read().decode()
    return {name: float(value) for name, value in re.findall(r"^hvdlite_serve_(\w+) (\S+)$", text, re.MULTILINE)}


async def measure(url: str, load: float, seconds: float, seed: int) -> tuple[float, float]:
    """Return the p99 of the latency, and the compute for each request, both in seconds."""
    to = target(url, SENT, {})
    before = metrics(url)
    _, latency = await send(to, poisson(load * CAPACITY, seconds, seed=seed))
    busy = metrics(url)["service_seconds_sum"] - before["service_seconds_sum"]
    return float(np.quantile(latency, 0.99)), busy / len(latency)


async def at_loads(loads: Sequence[float]) -> None:
    """Compare the chosen time-out with fixed ones."""
    rows = [
        [
            "load",
            "chosen ms",
            "p99 ms",
            "predicted ÷ measured",
            "compute ms/request",
            "÷ best fixed that keeps the bound",
        ]
    ]
    options = {CHOSEN: ["--slo-p99", f"{BOUND * 1e3:g}ms"]} | {
        f"{wait} ms": ["--max-wait", f"{wait}ms"] for wait in WAITS
    }
    with contextlib.ExitStack() as stack:
        urls = {}
        for name, words in options.items():
            urls[name], process = stack.enter_context(ours(MODEL, name, *words))
            check(name, urls[name], process, MODEL, SENT.data[0])
        with tqdm(total=len(loads) * (len(WAITS) + 2), leave=False, disable=None) as progress:
            for load in loads:
                progress.set_description(f"load {load:.0%}")
                await measure(urls[CHOSEN], load, WATCH, 1)
                progress.update()
                # It may choose again meanwhile; what is predicted is the mean of what it says before and after.
                said = metrics(urls[CHOSEN])
                p99, compute = await measure(urls[CHOSEN], load, MEASURED, 2)
                progress.update()
                both = [said, metrics(urls[CHOSEN])]
                wait, predicted = (
                    float(np.mean([each[name] for each in both]))
                    for name in ("max_wait_seconds", "predicted_p99_seconds")
                )
                best = np.inf
                for fixed in WAITS:
                    other = await measure(urls[f"{fixed} ms"], load, SECONDS, 3)
                    best = min(best, other[1] if other[0] <= BOUND else np.inf)
                    progress.update()
                times = [f"{value * 1e3:.3g}" for value in (wait, p99)]
                rows.append(
                    [f"{load:.0%}", *times, f"{predicted / p99:.2f}", f"{compute * 1e3:.3g}", f"{compute / best:.2f}"]
                )
    print(aligned(rows))


async def at_a_jump() -> None:
    """Let the load become ten times as high, and show the p99 of each second."""
    with ours(MODEL, CHOSEN, "--slo-p99", f"{JUMP_BOUND * 1e3:g}ms") as (url, process):
        check(CHOSEN, url, process, MODEL, SENT.data[0])
        old, new = poisson(BEFORE * CAPACITY, 12.0, seed=1), poisson(JUMP * BEFORE * CAPACITY, 10.0, seed=2)
        due, latency = await send(target(url, SENT, {}), np.concatenate([old, 12.0 + new]))
    p99 = [np.quantile(latency[(due >= second) & (due < second + 1)], 0.99) * 1e3 for second in range(22)]
    print(f"bound {JUMP_BOUND * 1e3:g} ms; load {BEFORE:.0%}, then {JUMP * BEFORE:.0%}; p99 of each second in ms:")
    print("  before:", *(f"{each:.1f}" for each in p99[:12]))
    print("  after: ", *(f"{each:.1f}" for each in p99[12:]))
    late = [number for number, each in enumerate(p99[12:]) if each > JUMP_BOUND * 1e3]
    print(f"the bound is met again after {late[-1] + 1 if late else 0} s")


def main(arguments: Sequence[str]) -> int:
    """Run a part."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving_slo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", choices=["loads", "jump"])
    parser.add_argument(
        "loads", nargs="*", type=float, help="shares of what one replica can serve (0.02 0.1 0.3 0.6 0.9)"
    )
    options = parser.parse_args(arguments)
    here = machine()
    print(f"{here['date']}, {here['cores']} cores ({here['cpu']}), load {here['load_average']:.1f} at the start")
    try:
        asyncio.run(at_a_jump() if options.part == "jump" else at_loads(options.loads or (0.02, 0.1, 0.3, 0.6, 0.9)))
    except FailedError as error:
        print(f"python -m benchmarks.serving_slo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
