"""Train the text GPT on two hosts with a slow link between them, and count what travels.

    python -m benchmarks.slow_link
    python -m benchmarks.slow_link --rate 1gbit --steps 200 --sends gradients powersgd:4 diloco:64 --plot link.png

The two hosts are namespaces of this machine with one rank each (`tests/hosts.py`; this needs root), and `tc` limits what each
of them may send. Each way runs `examples/torch_gpt_text.py --send WAY`, one after the other. Bytes are those that the network
interface of the first host has sent, with everything that belongs to them: set-up, losses, evaluations. The loss is that on the
held-out text, at the end.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.machine import machine
from benchmarks.report import aligned, heading, size
from tests.hosts import ROOT, Hosts, hosts, why_not

SENDS = ["gradients", "fp16", "powersgd:4", "powersgd:8", "topk:0.01", "localsgd:8", "localsgd:64", "diloco:64"]
LIMIT = 900.0
"""The longest time of one training in seconds."""


def sent(on: Hosts) -> int:
    """Return how many bytes the first host has sent."""
    return int(on.run("node1", "cat", "/sys/class/net/eth0/statistics/tx_bytes", timeout=20).stdout)


def train(on: Hosts, way: str, steps: int, picture: Path) -> dict[str, Any]:
    """Train once, and return the figures.

    Raises:
        SystemExit: The training has failed.
    """
    program = [
        "examples/torch_gpt_text.py",
        "--send",
        way,
        "--steps",
        str(steps),
        "--sample",
        "1",
        "--plot",
        str(picture),
    ]
    launch = ["-m", "hvdlite.launch", "-np", "2", "-H", "node1:1,node2:1", "--no-tag-output", sys.executable]
    before, begin = sent(on), time.monotonic()
    done = on.run("node1", sys.executable, *launch, *program, timeout=LIMIT, OMP_NUM_THREADS="1")
    seconds, nbytes = time.monotonic() - begin, sent(on) - before
    loss = re.search(r"before, ([\d.]+) after step", done.stdout)
    speed = re.search(r"tokens/s: (\d+) on 2 ranks", done.stdout)
    if done.returncode or not loss or not speed:
        raise SystemExit(f"slow_link: {way} has failed.\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    per_step = 16 * 64 / float(speed[1])
    return {"way": way, "loss": float(loss[1]), "bytes": nbytes / steps, "step": per_step, "seconds": seconds}


def table(figures: Sequence[dict[str, Any]]) -> str:
    """Return the figures as text. Ratios are to the first way; below 1 is less."""
    first = figures[0]
    rows = [["", "sent per step and host", "less by", "time of a step", "ratio", "loss", "difference"]]
    for each in figures:
        rows.append(
            [
                *(each["way"], size(round(each["bytes"])), f"{first['bytes'] / each['bytes']:.0f} ×"),
                *(f"{1e3 * each['step']:.0f} ms", f"{each['step'] / first['step']:.2f}"),
                *(f"{each['loss']:.3f}", f"{each['loss'] / first['loss'] - 1:+.1%}"),
            ]
        )
    return aligned(rows)


def draw(figures: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draw the loss by the time of a step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    picture, axes = plt.subplots(layout="constrained")
    for each in figures:
        axes.plot(1e3 * each["step"], each["loss"], "o")
        axes.annotate(each["way"], (1e3 * each["step"], each["loss"]), xytext=(5, 5), textcoords="offset points")
    axes.set(xlabel="time of a step, ms", ylabel="loss on held-out text, nats per byte", title=title)
    axes.set_xlim(left=0)
    picture.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit", help="what each host may send, as tc writes it (100mbit)")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--sends", nargs="+", default=SENDS, metavar="WAY", help=f"{' '.join(SENDS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the loss by the time of a step")
    options = parser.parse_args()
    if reason := why_not(needs_rate=True):
        parser.error(reason)
    figures = []
    with hosts(2, options.rate) as on:
        for way in tqdm(options.sends, unit="training", disable=None):
            figures.append(train(on, way, options.steps, ROOT / ".slow_link.png"))
    (ROOT / ".slow_link.png").unlink(missing_ok=True)
    here = machine()
    title = f"two hosts, {options.rate} between them, {options.steps} steps"
    print(f"{title}\n{heading(here, {'library': ''})}")
    print(table(figures))
    if options.json:
        options.json.write_text(json.dumps({"machine": here, "figures": figures}, indent=2) + "\n")
    if options.plot:
        draw(figures, title, options.plot)


if __name__ == "__main__":
    main()
