"""Seeded faults in an elastic training: ``scripts/faults --elastic --seed 1 --count 100`` runs many.

The training (tests/programs/elastic_counter.py) must come to its end with each step counted once and the weights of a training
that nothing has disturbed, and must leave nothing behind.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import sys
import tempfile
import time
from dataclasses import dataclass
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


def choose(seed: int, count: int) -> list[list[Fault]]:
    """Return the faults of a run, by job. The same seed gives the same faults."""
    rng = random.Random(seed)
    kinds = [*_AT_ONCE, *_ANYWHERE]
    rng.shuffle(kinds)
    kinds += rng.choices(kinds, k=count)
    jobs = []
    for first in range(0, count, IN_A_JOB):
        chosen = kinds[first : min(first + IN_A_JOB, count)]
        steps = rng.sample(range(1, STEPS), len(chosen))
        jobs.append([_draw(rng, kind, step) for kind, step in zip(chosen, steps, strict=True)])
    return jobs


def _draw(rng: random.Random, kind: str, step: int) -> Fault:
    place = rng.choice(["step", "exchanged", "commit"])
    rank = rng.randrange(RANKS)
    if place == "commit":
        rank, step = 0, step + step % 2  # rank 0 writes what is committed; some trainings commit each second step
    return Fault(kind, rank, step, place, rng.choice([0, rng.randrange(1, 300)]) if kind in _ANYWHERE else 0)


def undisturbed(steps: int = STEPS, width: int = 1000) -> str:
    """The weights that the training has in the end, as the program prints them: by NumPy, in one process."""
    weights = np.zeros(width)
    for step in range(steps):
        samples = np.random.default_rng(step).standard_normal((12, width))
        parts = [(weights - samples[rank::RANKS]).sum(0) for rank in range(RANKS)]
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
    """

    def __init__(self, faults: list[Fault], folder: Path, every: int = 1) -> None:
        self._faults, self._folder = faults, folder
        words = ",".join(f"{number}.{fault}" for number, fault in enumerate(faults))
        environ = {
            "COUNTER_STEPS": str(STEPS),
            "COUNTER_FOLDER": str(folder),
            "COUNTER_FAULTS": words,
            "COUNTER_EVERY": str(every),
        }
        program = ["--min-np", str(RANKS), "python", str(PROGRAMS / "elastic_counter.py")]
        self.started = Started(["-np", str(RANKS), *program], environ)

    def end(self) -> list[str]:
        """Wait for the end. Return all that was wrong, as texts."""
        try:
            ended = self.started.end(LIMIT)
        except Exception as error:
            self.started.process.kill()
            return [f"it has not come to its end: {error}"]
        wrong = []
        said = [line for line in ended.out.splitlines() if " steps, counted " in line]
        once = repr({np.int64(1)})
        expected = f"[0] {STEPS} steps, counted {once} times and {STEPS} in all, sizes [{RANKS}], resets [], weights"
        if ended.code != 0:
            wrong.append(f"exit code {ended.code}: {ended.err[-1500:]}")
        elif not said or said[-1] != f"{expected} {undisturbed()}":
            wrong.append(f"it printed {said[-1:] or ended.out[-500:]}, and not {expected} {undisturbed()}")
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
    options = parser.parse_args()
    bad, done, begun, restarts = 0, 0, time.monotonic(), 0
    for number, faults in enumerate(choose(options.seed, options.count)):
        with tempfile.TemporaryDirectory() as folder:
            training = Training(faults, Path(folder), every=1 + number % 2)
            wrong = training.end()
            restarts += training.restarts
        done += len(faults)
        bad += bool(wrong)
        if wrong:
            sys.stdout.write(f"{' '.join(map(str, faults))}\n" + "".join(f"    {text}\n" for text in wrong))
        seconds = time.monotonic() - begun
        sys.stdout.write(f"{done}/{options.count} faults, {restarts} restarts, {bad} jobs wrong, {seconds:.0f} s\n")
        sys.stdout.flush()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
