"""Measure the modes of a parameter server against each other: samples per second, and what is learned.

    python -m benchmarks.modes                      about five minutes
    python -m benchmarks.modes pace                 samples per second with a slow rank, and with random stalls
    python -m benchmarks.modes learning --plot docs/modes.svg

*pace*: the computation of a batch is a wait of 10 ms, as on an accelerator. So the ranks do not compete for the cores of this
machine, and a slow rank is slow by itself. The modes take turns in the same processes.

*learning*: the digits and the text GPT of the examples, really computed, by four ranks. The last one sleeps until a batch has
taken it five times as long. All ranks meet at the end of each interval to test the common parameters. The clock stands still
meanwhile. Updates are the steps of the servers' optimizer. One update of sync is made of four batches, so sync is trained with
a larger rate, too: four times as large for SGD (digits), and twice for AdamW (text GPT).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import hvdlite_torch as hvd
from benchmarks.job import ROOT, run
from benchmarks.machine import machine
from benchmarks.report import aligned, heading

MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "ssp, 3": {"mode": "ssp", "staleness": 3},
    "async": {"mode": "async"},
}
SCALED = "sync, larger rate"
RANKS = 4
BATCH_SECONDS = 0.01
STALLS: dict[str, Callable[[int, torch.Generator], float]] = {
    "all alike": lambda rank, chance: 1.0,
    "one rank 5 times slower": lambda rank, chance: 5.0 if rank == RANKS - 1 else 1.0,
    "random stalls: every tenth batch takes 10 times as long": lambda rank, chance: (
        10.0 if torch.rand((), generator=chance) < 0.1 else 1.0
    ),
}
"""How many times as long a batch takes, by the rank."""


def measure(part: str, **settings: Any) -> Any:
    """Measure on this rank; see `benchmarks.job`."""
    parts: dict[str, Callable[..., Any]] = {"pace": _pace, "learning": _learning}
    return parts[part](**settings)


def _pace(rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Return the samples per second of all ranks, in each round, by the stalls and the mode."""
    samples: dict[tuple[str, str], list[float]] = {(stall, mode): [] for stall in STALLS for mode in MODES}
    for _ in tqdm(range(rounds), "pace", leave=False, disable=hvd.rank() > 0):
        for (stall, mode), found in samples.items():
            chance = torch.Generator().manual_seed(hvd.rank())
            model = nn.Linear(64, 64)
            optimizer = hvd.AsyncDistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-3), model, **MODES[mode])
            x, used = torch.ones(32, 64), 0
            optimizer.synchronize()
            begin = time.perf_counter()
            while time.perf_counter() < begin + seconds:
                time.sleep(BATCH_SECONDS * STALLS[stall](hvd.rank(), chance))
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                used += len(x)
            optimizer.finish()
            spent = time.perf_counter() - begin
            found.append(sum(hvd.allgather_object(used)) / spent)
    return [{"stall": stall, "mode": mode, "samples": found} for (stall, mode), found in samples.items()]


class Task:
    """A model, how it is trained, and how it is tested.

    Args:
        name: "digits" or "text GPT".
        batches: How many batches an update is made of.
    """

    def __init__(self, name: str, batches: int) -> None:
        self.name = name
        if name == "digits":
            example = _example("torch_async_digits")
            self.model: nn.Module = example.network()
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05 * batches)
            self._images, self._labels = example.load()
            self._cut = example.TRAIN
        else:
            example = _example("torch_gpt_text")
            torch.manual_seed(0)
            self.model = example.GPT(2, 64, 64)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3 * batches**0.5)
            self._text, self._held_out = example.load()

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield the mean loss of each batch of this rank, without end."""
        draw = torch.Generator().manual_seed(1 + hvd.rank())
        for _ in count():
            if self.name == "digits":
                chosen = torch.randint(self._cut, (32,), generator=draw)
                yield F.cross_entropy(self.model(self._images[chosen]), self._labels[chosen])
            else:
                starts = torch.randint(len(self._text) - 64, (8,), generator=draw)
                windows = self._text[starts[:, None] + torch.arange(65)]
                yield F.cross_entropy(self.model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    @torch.no_grad()
    def test(self) -> tuple[float, float]:
        """Return the loss, and the part of right answers, on what was held out."""
        if self.name == "digits":
            return self._measure(self.model(self._images[self._cut :]), self._labels[self._cut :])
        windows = self._held_out.unfold(0, 65, 64)[:128]
        return self._measure(self.model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    @staticmethod
    def _measure(logits: torch.Tensor, truth: torch.Tensor) -> tuple[float, float]:
        return float(F.cross_entropy(logits, truth)), float((logits.argmax(1) == truth).float().mean())


def _learning(task: str, mode: str, seconds: float, intervals: int) -> dict[str, Any]:
    """Train once, and return the time, the updates, the loss and the accuracy at the beginning and after each interval."""
    trained = Task(task, RANKS if mode == SCALED else 1)
    optimizer = hvd.AsyncDistributedOptimizer(
        trained.optimizer, trained.model, **MODES["sync" if mode == SCALED else mode]
    )
    assert isinstance(optimizer, hvd.AsyncDistributed)  # a type checker cannot know
    slow, batches = hvd.rank() == RANKS - 1, trained.batches()
    points, spent, used = [(0.0, 0, *trained.test())], 0.0, 0
    for _ in tqdm(range(intervals), f"{task}, {mode}", leave=False, disable=hvd.rank() > 0):
        optimizer.synchronize()
        begin = time.perf_counter()
        while time.perf_counter() < begin + seconds / intervals:
            computed = time.perf_counter()
            optimizer.zero_grad()
            next(batches).backward()
            if slow:
                time.sleep(4 * (time.perf_counter() - computed))
            optimizer.step()
            used += 1
        optimizer.synchronize()
        spent += time.perf_counter() - begin
        made = hvd.allgather_object(used)
        points.append((spent, sum(made) if mode in ("ssp, 3", "async") else max(made), *trained.test()))
    optimizer.finish()
    delay = sum(hvd.allgather_object(optimizer.mean_delay)) / RANKS
    return {"task": task, "mode": mode, "points": points, "batches": sum(hvd.allgather_object(used)), "delay": delay}


def _example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def pace_table(figures: Sequence[dict[str, Any]]) -> str:
    """Return the medians of samples per second, and their ratios to sync."""
    rows = [["samples/s, and ÷ sync", *MODES]]
    for stall in STALLS:
        found = {each["mode"]: statistics.median(each["samples"]) for each in figures if each["stall"] == stall}
        rows.append([stall, *(f"{found[mode]:.0f}  {found[mode] / found['sync']:.2f}" for mode in MODES)])
    return aligned(rows)


def learning_table(figures: Sequence[dict[str, Any]]) -> str:
    """Return what each mode has learned in the same time."""
    rows = [["", "updates", "batches", "missed pushes", "loss in the end", "accuracy"]]
    for each in figures:
        _, updates, loss, accuracy = each["points"][-1]
        rows.append(
            [
                *(f"{each['task']}, {each['mode']}", f"{updates}", f"{each['batches']}"),
                *(f"{each['delay']:.1f}", f"{loss:.3f}", f"{accuracy:.1%}"),
            ]
        )
    return aligned(rows)


def draw(figures: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the loss by time and by updates, a row for each task."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # letters as letters: a small file
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(each["task"] for each in figures))
    picture, panels = plt.subplots(
        len(tasks), 2, figsize=(9, 3.4 * len(tasks)), layout="constrained", sharey="row", squeeze=False
    )
    for row, task in zip(panels, tasks, strict=True):
        for each in (each for each in figures if each["task"] == task):
            seconds, updates, losses, _ = zip(*each["points"], strict=True)
            row[0].plot(seconds, losses, marker=".", label=each["mode"])
            row[1].plot(updates[1:], losses[1:], marker=".")
        row[0].set(xlabel="seconds of training", ylabel=f"{task}: loss on held-out data")
        row[1].set(xlabel="updates of the parameters", xscale="log")
        if task == "digits":
            row[0].set_yscale("log")
        row[0].legend(frameon=False)
    picture.suptitle("Four ranks, one of them five times slower")
    picture.savefig(path, dpi=120)
    plt.close(picture)


def main() -> None:
    """Parse the command line, measure, and show the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="all", choices=["all", "pace", "learning"])
    parser.add_argument("--rounds", type=int, default=5, help="of pace: turns of each mode (5)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of learning: the time of each training (20)")
    parser.add_argument("--intervals", type=int, default=10, help="of learning: how often the model is tested (10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw what was learned, by time and by updates")
    options = parser.parse_args()
    for file in (options.json, options.plot):
        if file and not file.absolute().parent.is_dir():
            parser.error(f"{file}: there is no folder {file.absolute().parent}")
    here, pace, learning = machine(), [], []
    if options.part != "learning":
        pace = run("modes", RANKS, {"part": "pace", "rounds": options.rounds, "seconds": 1.5})
    if options.part != "pace":
        learning = [
            run(
                "modes",
                RANKS,
                {
                    **{"part": "learning", "task": task, "mode": mode},
                    **{"seconds": options.seconds, "intervals": options.intervals},
                },
            )
            for task in ("digits", "text GPT")
            for mode in ("sync", SCALED, "ssp, 3", "async")
        ]
    print(f"Modes of a parameter server, {RANKS} ranks\n{heading(here, {'library': ''})}")
    for figures, table in ((pace, pace_table), (learning, learning_table)):
        if figures:
            print(f"\n{table(figures)}")
    if options.json:
        options.json.write_text(json.dumps({"machine": here, "pace": pace, "learning": learning}, indent=2) + "\n")
    if options.plot and learning:
        draw(learning, options.plot)


if __name__ == "__main__":
    main()
