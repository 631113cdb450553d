"""Measure what it saves to push gradients to a parameter server while the backward pass goes on, and to pull in the next one.

    python -m benchmarks.early_push
    python -m benchmarks.early_push --rates none 1gbit 100mbit --batch 1024

Two hosts, which are namespaces of this machine (`tests/support/hosts.py`; this needs root), have one rank each, which trains
and serves. `tc` limits what each host may send. One training pushes in its steps, another one early, and a third one also lets
values come during the next forward pass. They take turns in the same processes, three steps each. The third step of a turn
waits for all values. Figures are of one step: medians of the turns, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.machine import machine
from benchmarks.report import aligned, heading
from tests.support.hosts import Hosts, hosts, why_not

LIMIT = 200.0
"""The longest time of one job in seconds."""
WIDTH, LAYERS = 512, 8
TRAININGS: dict[str, dict[str, Any]] = {
    "step": {"overlap": False},
    "early": {"overlap": True},
    "both": {"overlap": True, "overlap_pull": True},
}
STEPS = 3
"""How many steps a training makes in its turn."""


def on_rank(mode: str, batch: int, turns: int) -> None:
    """Make steps on this rank; print the figures on the first one: seconds of a step in each turn, in JSON."""
    import torch
    from torch import nn

    import hvdlite_torch as hvd

    hvd.init()
    torch.manual_seed(0)
    trainings: dict[str, tuple[nn.Sequential, Any]] = {}
    for name, options in TRAININGS.items():
        model = nn.Sequential(*(each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
        plain = torch.optim.SGD(model.parameters(), lr=1e-3)
        trainings[name] = model, hvd.AsyncDistributedOptimizer(plain, model, mode=mode, **options)
    x = torch.randn(batch, WIDTH)
    seconds: dict[str, list[float]] = {"forward": [], "backward": [], **{name: [] for name in TRAININGS}}
    for _ in range(1 + turns):
        for name, (model, optimizer) in trainings.items():
            hvd.barrier()
            first = begin = time.perf_counter()
            for _ in range(STEPS):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                forward = time.perf_counter()
                loss.backward()
                backward = time.perf_counter()
                optimizer.step()
                if name == "step":
                    seconds["forward"].append(forward - begin)
                    seconds["backward"].append(backward - forward)
                begin = time.perf_counter()
            optimizer.wait()
            seconds[name].append((time.perf_counter() - first) / STEPS)
    for _, optimizer in trainings.values():
        optimizer.finish()
    if hvd.rank() == 0:
        print(json.dumps({name: each[len(each) // (1 + turns) :] for name, each in seconds.items()}), flush=True)


def measure(on: Hosts, mode: str, batch: int, turns: int) -> dict[str, list[float]]:
    """Run a job on the two hosts, and return its figures.

    Raises:
        SystemExit: The job has failed.
    """
    launch = ["-m", "hvdlite.launch", "-np", "2", "-H", "node1:1,node2:1", "--no-tag-output", sys.executable]
    program = ["-m", "benchmarks.early_push", "--on-rank", mode, "--batch", str(batch), "--turns", str(turns)]
    done = on.run("node1", sys.executable, *launch, *program, timeout=LIMIT, OMP_NUM_THREADS="1")
    if done.returncode:
        raise SystemExit(f"early_push: {mode} has failed.\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    figures: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return figures


def text_of(seconds: Sequence[float]) -> str:
    """Return the median and the extremes in milliseconds."""
    median, least, most = (1e3 * each for each in (statistics.median(seconds), min(seconds), max(seconds)))
    return f"{median:.0f} ({least:.0f} to {most:.0f}) ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rates", nargs="+", default=["100mbit"], help="what each host may send, as tc writes it; or none"
    )
    parser.add_argument("--modes", nargs="+", default=["sync", "async"])
    parser.add_argument("--batch", type=int, default=4096, help="rows of a batch of each rank (4096)")
    parser.add_argument("--turns", type=int, default=4, help="turns of each training that are measured (4)")
    parser.add_argument("--on-rank", metavar="MODE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_rank:
        on_rank(options.on_rank, options.batch, options.turns)
        return
    if reason := why_not(needs_rate=True):
        parser.error(reason)
    rows = [
        [
            "link",
            "mode",
            "forward",
            "backward",
            "pushed in the step",
            "pushed early",
            "and pulled late",
            "ratio",
            "ratio",
        ]
    ]
    for rate in options.rates:
        with hosts(2, None if rate == "none" else rate) as on:
            for mode in options.modes:
                figures = measure(on, mode, options.batch, options.turns)
                early, both = (statistics.median(figures[name]) for name in ("early", "both"))
                whole = statistics.median(figures["step"])
                rows.append(
                    [rate, mode, *map(text_of, figures.values()), f"{early / whole:.2f}", f"{both / whole:.2f}"]
                )
    print(heading(machine(), {"library": ""}))
    print(f"{LAYERS} layers of {WIDTH} x {WIDTH}, batches of {options.batch} rows")
    print(aligned(rows))


if __name__ == "__main__":
    main()
