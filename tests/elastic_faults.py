"""Seeded faults in an elastic training: ``scripts/faults --elastic --seed 1 --count 100`` runs many.

The training (tests/programs/elastic_counter.py) must come to its end with each step counted once and the weights of a training
that nothing has disturbed, and must leave nothing behind. With ``--fewest 2`` it goes on in the processes that are left, if two
are; its weights are then those of a training on the ranks that there were at each step.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from tests.jobs import PROGRAMS, Started

RANKS = 4
STEPS = 60
IN_A_JOB = 5
LIMIT = 240.0  # seconds for one job: only a hang takes that long
_AT_ONCE = ("exception", "exit3", "exit0")
_ANYWHERE = ("kill", "memory", "os_exit", "segfault", "stop")


@dataclass(frozen=True)
class Fault:
    """A fault: its kind, the rank, the step and the place in it, and how many tenths of a millisecond later it strikes."""

    kind: str
    rank: int
    step: int
    place: str
    delay: int

    def __str__(self) -> str:
        return f"{self.kind}.{self.rank}.{self.step}.{self.place}.{self.delay}"


def choose(seed: int, count: int, ranks: int = RANKS) -> list[list[Fault]]:
    """Return the faults of a run, by job. The same seed gives the same faults.

    Args:
        seed, count: What is chosen.
        ranks: They strike the first so many ranks.
    """
    rng = random.Random(seed)
    kinds = [*_AT_ONCE, *_ANYWHERE]
    rng.shuffle(kinds)
    kinds += rng.choices(kinds, k=count)
    jobs = []
    for first in range(0, count, IN_A_JOB):
        chosen = kinds[first : min(first + IN_A_JOB, count)]
        steps = rng.sample(range(1, STEPS), len(chosen))
        jobs.append([_draw(rng, kind, step, ranks) for kind, step in zip(chosen, steps, strict=True)])
    return jobs


def _draw(rng: random.Random, kind: str, step: int, ranks: int) -> Fault:
    place = rng.choice(["step", "exchanged", "commit"])
    rank = rng.randrange(ranks)
    if place == "commit":
        rank, step = 0, step + step % 2  # rank 0 writes what is committed; some trainings commit each second step
    return Fault(kind, rank, step, place, rng.choice([0, rng.randrange(1, 300)]) if kind in _ANYWHERE else 0)


def undisturbed(steps: int = STEPS, width: int = 1000, changes: Sequence[tuple[int, int]] = ()) -> str:
    """The weights that the training has in the end, as the program prints them: by NumPy, in one process.

    Args:
        steps, width: The steps, and the number of weights.
        changes: The steps before which the number of ranks has changed, each with that number.
    """
    weights, size, sizes = np.zeros(width), RANKS, dict(changes)
    for step in range(steps):
        size = sizes.get(step, size)
        samples = np.random.default_rng(step).standard_normal((12, width))
        parts = [(weights - samples[rank::size]).sum(0) for rank in range(size)]
        total = parts[0]
        for part in parts[1:]:  # hvdlite sums in the order of the ranks
            total = total + part
        weights = weights - 0.1 * (total / len(samples))
    return hashlib.sha256(weights.tobytes()).hexdigest()[:16]


class Training:
    """A running training with its faults.

    Args:
        faults: The faults that are to happen in it.
        folder: An empty folder.
        every: It commits after so many steps.
        fewest: It goes on with so many ranks.
    """

    def __init__(self, faults: list[Fault], folder: Path, every: int = 1, fewest: int = RANKS) -> None:
        self._faults, self._folder, self._fewest = faults, folder, fewest
        words = ",".join(f"{number}.{fault}" for number, fault in enumerate(faults))
        environ = {
            "COUNTER_STEPS": str(STEPS),
            "COUNTER_FOLDER": str(folder),
            "COUNTER_FAULTS": words,
            "COUNTER_EVERY": str(every),
        }
        options = ["--min-np", str(fewest), "--blacklist-cooldown-range", "0.05", "0.1"]
        program = [*options, "python", str(PROGRAMS / "elastic_counter.py")]
        self.started = Started(["-np", str(RANKS), *program], environ)
        self.recoveries = 0
        """How often ranks have gone on in their processes."""

    def end(self) -> list[str]:
        """Wait for the end. Return all that was wrong, as texts."""
        try:
            ended = self.started.end(LIMIT)
        except Exception as error:
            self.started.process.kill()
            return [f"it has not come to its end: {error}"]
        wrong = []
        self.recoveries = ended.err.count(" go on in their processes")
        said = [line.partition("] ")[2] for line in ended.out.splitlines() if " steps, counted " in line]
        once = repr({np.int64(1)})
        found = re.findall(r"resets (\[.*\])", said[-1]) if said else []
        changes: list[tuple[int, int]] = ast.literal_eval(found[0]) if found and self._fewest < RANKS else []
        sizes = [RANKS, *(size for step, size in changes if 0 < step < STEPS)]
        expected = (
            f"{STEPS} steps, counted {once} times and {STEPS} in all, sizes {[size for size, _ in groupby(sizes)]}, "
            f"resets {changes}, weights {undisturbed(changes=changes)}"
        )
        if ended.code != 0:
            wrong.append(f"exit code {ended.code}: {ended.err[-1500:]}")
        elif not said or said[-1] != expected:
            wrong.append(f"it printed {said[-1:] or ended.out[-500:]}, and not {expected}")
        if any(size < self._fewest for size in sizes):
            wrong.append(f"it has gone on with {sizes} ranks, and fewer than {self._fewest}")
        happened = {int(path.name.split(".")[1]) for path in self._folder.glob("fault.*")}
        if missing := set(range(len(self._faults))) - happened:
            wrong.append(f"faults that have not happened: {[str(self._faults[number]) for number in sorted(missing)]}")
        deadline = time.monotonic() + 3.0
        while (left := self.started.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        if left:
            wrong.append(f"processes that are left: {left}")
        pids = {str(self.started.process.pid)}
        if files := [
            name for name in os.listdir("/dev/shm") if name.startswith("hvdlite.") and pids & {*name.split(".")}
        ]:
            wrong.append(f"files that are left: {files}")
        return wrong

    @property
    def restarts(self) -> int:
        """How often the training has started, less one."""
        return len(re.findall(r"^.+$", (self._folder / "starts").read_text(), re.M)) - 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.elastic_faults", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="the same seed gives the same faults")
    parser.add_argument("--count", type=int, required=True, help="how many")
    parser.add_argument("--fewest", type=int, default=RANKS, help=f"go on with so many ranks ({RANKS})")
    options = parser.parse_args()
    bad, done, begun, restarts, recoveries = 0, 0, time.monotonic(), 0, 0
    for number, faults in enumerate(choose(options.seed, options.count, options.fewest)):
        with tempfile.TemporaryDirectory() as folder:
            training = Training(faults, Path(folder), every=1 + number % 2, fewest=options.fewest)
            wrong = training.end()
            restarts += training.restarts
            recoveries += training.recoveries
        done += len(faults)
        bad += bool(wrong)
        if wrong:
            sys.stdout.write(f"{' '.join(map(str, faults))}\n" + "".join(f"    {text}\n" for text in wrong))
        seconds = time.monotonic() - begun
        sys.stdout.write(
            f"{done}/{options.count} faults, {restarts} restarts, {recoveries} times gone on in the processes, {bad} jobs wrong, "
            f"{seconds:.0f} s\n"
        )
        sys.stdout.flush()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
