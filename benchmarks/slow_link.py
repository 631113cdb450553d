"""Train the text GPT on two hosts with a slow link between them, and count what travels.

    python -m benchmarks.slow_link
    python -m benchmarks.slow_link --rate 1gbit --steps 200 --sends gradients powersgd:4 diloco:64 --plot link.png
    python -m benchmarks.slow_link --sends gradients powersgd:16,16@1000 diloco:100,0.9,0.3@1300     # steps of its own
    python -m benchmarks.slow_link --one-host --steps 200

The two hosts are namespaces of this machine with one rank each (`tests/support/hosts.py`; this needs root). `tc` limits what
each of them may send. Each way runs `examples/torch_gpt_text.py --send WAY`, one after the other. Bytes are those that the
network interface of the first host has sent in the whole training, with all that belongs to them: set-up, losses, evaluations.
The time is that of all steps, and the loss that on the held-out text at the end. A way that sends less learns less in a step,
so it may get more steps. --one-host trains on one host, where nothing has to travel and sending less only costs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.machine import machine
from benchmarks.report import aligned, heading
from tests.support.hosts import ROOT, Hosts, hosts, why_not

SENDS = [
    *("gradients", "fp16", "powersgd:4", "powersgd:8", "topk:0.01", "localsgd:8", "localsgd:64", "diloco:64"),
    *("powersgd:16,16@1000", "diloco:100,0.9,0.3@1300"),
]
LIMIT = 900.0
"""The longest time of one training in seconds."""


def sent(on: Hosts | None) -> int:
    """Return how many bytes the first host has sent."""
    return (
        0 if on is None else int(on.run("node1", "cat", "/sys/class/net/eth0/statistics/tx_bytes", timeout=20).stdout)
    )


def train(on: Hosts | None, way: str, steps: int, picture: Path) -> dict[str, Any]:
    """Train once, and return the figures.

    Args:
        on: The two hosts; None for this machine alone.
        way: What they send; after a ``@``, the number of steps.
        steps: The number of steps of a way without one.
        picture: A file for the loss curve.

    Raises:
        SystemExit: The training has failed.
    """
    sends, _, own_steps = way.partition("@")
    steps = int(own_steps or steps)
    program = ["examples/torch_gpt_text.py", "--send", sends, "--steps", str(steps)]
    program += ["--sample", "1", "--plot", str(picture)]
    where = [] if on is None else ["-H", "node1:1,node2:1"]
    command = [sys.executable, "-m", "hvdlite.launch", "-np", "2", *where, "--no-tag-output", sys.executable, *program]
    one_thread = {"OMP_NUM_THREADS": "1"}
    before, begin = sent(on), time.monotonic()
    if on is None:
        environ = os.environ | one_thread
        done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    else:
        done = on.run("node1", *command, timeout=LIMIT, **one_thread)
    seconds, nbytes = time.monotonic() - begin, sent(on) - before
    loss = re.search(r"before, ([\d.]+) after step", done.stdout)
    speed = re.search(r"tokens/s: (\d+) on 2 ranks", done.stdout)
    if done.returncode or not loss or not speed:
        raise SystemExit(f"slow_link: {way} has failed.\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    per_step = 16 * 64 / float(speed[1])
    return {
        **{"way": sends, "steps": steps, "loss": float(loss[1]), "bytes": nbytes},
        **{"training": per_step * steps, "seconds": seconds},
    }


def table(figures: Sequence[dict[str, Any]]) -> str:
    """Return the figures as text. Ratios are to the first way; below 1 is less."""
    first = figures[0]
    rows = [["", "steps", "a host sends", "less by", "time of training", "ratio", "of a step", "loss", "difference"]]
    for each in figures:
        step = 1e3 * each["training"] / each["steps"]
        less = f"{first['bytes'] / each['bytes']:.1f} ×" if each["bytes"] else "–"
        rows.append(
            [
                *(
                    each["way"],
                    str(each["steps"]),
                    f"{each['bytes'] / 2**20:.1f} MiB",
                    less,
                    f"{each['training']:.0f} s",
                ),
                *(f"{each['training'] / first['training']:.2f}", f"{step:.0f} ms"),
                *(f"{each['loss']:.3f}", f"{each['loss'] / first['loss'] - 1:+.1%}"),
            ]
        )
    return aligned(rows)


def draw(figures: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draw the loss by the time of the training."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    picture, axes = plt.subplots(layout="constrained")
    for each in figures:
        axes.plot(each["training"], each["loss"], "o")
        text = f"{each['way']}, {each['steps']} steps"
        axes.annotate(text, (each["training"], each["loss"]), xytext=(5, 5), textcoords="offset points")
    axes.set(xlabel="time of training, s", ylabel="loss on held-out text, nats per byte", title=title)
    axes.set_xlim(left=0)
    picture.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit", help="what each host may send, as tc writes it (100mbit)")
    parser.add_argument("--steps", type=int, default=800, help="of a way without steps of its own (800)")
    parser.add_argument("--sends", nargs="+", default=SENDS, metavar="WAY", help=f"{' '.join(SENDS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the loss by the time of training")
    parser.add_argument("--one-host", action="store_true", help="two ranks of this machine, without a link")
    options = parser.parse_args()
    if not options.one_host and (reason := why_not(needs_rate=True)):
        parser.error(reason)
    figures = []
    with nullcontext() if options.one_host else hosts(2, options.rate) as on:
        for way in tqdm(options.sends, unit="training", disable=None):
            figures.append(train(on, way, options.steps, ROOT / ".slow_link.png"))
    (ROOT / ".slow_link.png").unlink(missing_ok=True)
    here = machine()
    title = "one host" if options.one_host else f"two hosts, {options.rate} between them"
    print(f"{title}\n{heading(here, {'library': ''})}")
    print(table(figures))
    if options.json:
        options.json.write_text(json.dumps({"machine": here, "figures": figures}, indent=2) + "\n")
    if options.plot:
        draw(figures, title, options.plot)


if __name__ == "__main__":
    main()
