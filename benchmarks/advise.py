"""Compare what `hvdlite advise` predicts with what its strategies cost, on two hosts with a slow link between them.

    python -m benchmarks.advise
    python -m benchmarks.advise --rate 1gbit --strategies gradients powersgd:4 async

The two hosts are namespaces of this machine with one rank each (`tests/support/hosts.py`; this needs root). `tc` limits what
each of them may send. First `hvdlite advise` measures `benchmarks/advised.py` with whole gradients, and predicts. Then each
strategy runs for some steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.machine import machine
from benchmarks.report import aligned, heading
from hvdlite.tools.advise import TrainingStrategy, parse_strategy
from hvdlite.tools.advise.report import ms, size
from hvdlite.tools.advise.strategies import USUAL
from tests.support.hosts import Hosts, hosts, why_not

BURST = "64kb"
"""A host may send so much at once after a pause: little, or messages after a computation would travel faster than the link."""
LIMIT = 300.0
"""The longest time of one run in seconds."""
PROGRAM = "benchmarks/advised.py"
ON_BOTH = ["-H", "node1:1,node2:1"]


def run(on: Hosts, *words: str) -> str:
    """Run a command of Python on the first host, and return what it prints.

    Raises:
        SystemExit: It has failed.
    """
    done = on.run("node1", sys.executable, *words, timeout=LIMIT, OMP_NUM_THREADS="1")
    if done.returncode:
        raise SystemExit(f"advise: {' '.join(words)} has failed.\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def predict(on: Hosts, strategies: Sequence[TrainingStrategy], folder: Path) -> dict[str, Any]:
    """Return what ``hvdlite advise --json`` writes."""
    path = folder / "advice.json"
    words = ["-m", "hvdlite", "advise", PROGRAM, "-np", "2", *ON_BOTH, "--json", str(path)]
    words += ["--strategies", *map(str, strategies), "--", "gradients", "--steps", "1000"]
    print(run(on, *words))
    found: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return found


def measure(on: Hosts, strategy: TrainingStrategy, steps: int) -> dict[str, float]:
    """Return the seconds and bytes of a step of a strategy."""
    every = int(strategy.number) if strategy.kind in ("localsgd", "diloco") else 1
    whole = -(-steps // every) * every
    words = ["-np", "2", *ON_BOTH, "--no-tag-output", sys.executable, PROGRAM, str(strategy), "--steps", str(whole)]
    out = run(on, "-m", "hvdlite.launch", *words)
    found: dict[str, float] = json.loads(out.strip().splitlines()[-1])
    return found


def table(figures: Sequence[dict[str, Any]]) -> str:
    """Return the figures as text."""
    rows = [["", "time, predicted", "measured", "ratio", "bytes, predicted", "measured", "ratio"]]
    for each in figures:
        row = [each["strategy"], ms(each["predicted_seconds"]), ms(each["seconds"])]
        row += [
            f"{each['predicted_seconds'] / each['seconds']:.2f}",
            size(each["predicted_bytes"]),
            size(each["bytes"]),
        ]
        rows.append([*row, f"{each['predicted_bytes'] / each['bytes']:.3f}"])
    return aligned(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit", help="what each host may send, as tc writes it (100mbit)")
    parser.add_argument(
        "--steps", type=int, default=24, help="of each strategy (24), or as many as between two meetings"
    )
    parser.add_argument("--strategies", nargs="+", type=parse_strategy, default=list(USUAL), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    if reason := why_not(needs_rate=True):
        parser.error(reason)
    figures = []
    with hosts(2, options.rate, BURST) as on:
        advice = predict(on, options.strategies, Path.cwd())
        for strategy in tqdm(options.strategies, unit="strategy", disable=None):
            (said,) = [each for each in advice["estimates"] if each["strategy"] == str(strategy)]
            predicted = {"predicted_seconds": said["seconds"], "predicted_bytes": said["bytes"]}
            figures.append({"strategy": str(strategy), **predicted, **measure(on, strategy, options.steps)})
    here = machine()
    print(f"two hosts, {options.rate} between them, {options.steps} steps\n{heading(here, {'library': ''})}")
    print(table(figures))
    if options.json:
        options.json.write_text(json.dumps({"machine": here, "figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
