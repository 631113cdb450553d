"""Show how latency and cost depend on the time-out of a batch, and what ``hvdlite serve`` chooses.

    python -m benchmarks.serving_timeout --plot docs/serving_timeout.svg        half a minute

Requests come at random (Poisson). One replica needs 5 ms and 0.1 ms for each input of a batch of up to 32, give or take 3 %.
The requests go through the server's own batcher in virtual time. Each line is a load, as a share of the most that the replica
can serve. The points are what the chooser settles on for a p99 of at most 50 ms, after it has watched 20 seconds of this load.
"""

from __future__ import annotations

import argparse
import operator
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import aligned
from benchmarks.virtual_serving import Served, serve
from hvdlite.serving.chooser import AutoWait, Model
from hvdlite.serving.waiting import FixedWait

MAX_BATCH, BOUND = 32, 0.05
CAPACITY = MAX_BATCH / (0.005 + 0.0001 * MAX_BATCH)
LOADS = (0.02, 0.1, 0.3, 0.6, 0.9)
WAITS = np.linspace(0, 0.06, 25)
REQUESTS = 20000


def like_a_gpu(seed: int) -> Callable[[int], float]:
    """Return a service time in seconds, by batch size, that varies by 3 %."""
    random = np.random.default_rng(seed)
    return lambda size: float((0.005 + 0.0001 * size) * np.exp(random.normal(0, 0.03)))


def poisson(rate: float, count: int, seed: int) -> np.ndarray[Any, Any]:
    """Return the times of requests that come at random."""
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


def with_wait(load: float, wait: float) -> Served:
    """Serve a load with a fixed wait."""
    return serve(poisson(load * CAPACITY, REQUESTS, 1), like_a_gpu(2), FixedWait(wait), MAX_BATCH)


def chosen(load: float) -> float:
    """Return the wait that the chooser settles on."""
    chooser = AutoWait(Model(MAX_BATCH, slo_p99=BOUND).update)
    times = poisson(load * CAPACITY, int(load * CAPACITY * 20), 3)
    serve(times, like_a_gpu(4), chooser, MAX_BATCH, every=(1.0, chooser.choose))
    return chooser.wait_seconds


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving_timeout",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it")
    options = parser.parse_args(arguments)
    marks, lines = {}, {}
    rows = [["load", "chosen wait ms", "p99 ms", "compute ms/request", "÷ best that keeps the bound"]]
    for load in LOADS:
        wait = chosen(load)
        marks[load] = wait, with_wait(load, wait)
        lines[load] = [with_wait(load, each) for each in WAITS]
        best = min(each.compute for each in lines[load] if each.p99 <= BOUND)
        at = marks[load][1]
        times = [f"{value * 1e3:.3g}" for value in (wait, at.p99, at.compute)]
        rows.append([f"{load:.0%}", *times, f"{at.compute / best:.3f}"])
    print(aligned(rows))
    if options.plot:
        _plot(lines, marks, options.plot)
    return 0


def _plot(lines: dict[float, list[Served]], marks: dict[float, tuple[float, Served]], path: Path) -> None:
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "hvdlite"  # the same picture is the same file
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    picture = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = picture.subplots(1, 2)
    for number, (load, served) in enumerate(lines.items()):
        wait, at = marks[load]
        for axes, value in ((left, operator.attrgetter("p99")), (right, operator.attrgetter("compute"))):
            axes.plot(WAITS * 1e3, [value(each) * 1e3 for each in served], color=f"C{number}", label=f"{load:.0%}")
            axes.plot(wait * 1e3, value(at) * 1e3, "o", color=f"C{number}")
    left.axhline(BOUND * 1e3, color="black", linestyle=":", linewidth=1)
    left.set_ylabel("99th percentile of the latency in ms")
    right.set_ylabel("compute for each request in ms")
    right.set_yscale("log")
    right.set_yticks([0.3, 0.5, 1, 2, 4], ["0.3", "0.5", "1", "2", "4"])
    right.yaxis.set_minor_formatter(NullFormatter())
    for axes in (left, right):
        axes.set_xlabel("time-out in ms")
        axes.grid(alpha=0.3)
    right.legend(title="load")
    picture.suptitle("Latency and cost by time-out; the points are what the server chooses for a p99 of 50 ms")
    picture.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
