"""Seeded faults in an elastic training: ``scripts/faults --elastic --seed 1 --count 100`` runs many.

Each training (tests/programs/elastic_counter.py) must come to its end with each step counted once and the weights of a training
that nothing has disturbed, and must leave nothing behind. ``--in-a-job 100`` lets a hundred faults happen in one training. With
``--fewest 2`` a training goes on in the processes that are left, if two are. Its weights are then those of a training on the
ranks that there were at each step.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from hvdlite.launch.elastic.policy import FRUITLESS
from tests.support.jobs import PROGRAMS, Started

RANKS = 4
STEPS = 60
IN_A_JOB = 5
LIMIT = 240.0  # seconds for one job of so many faults: only a hang takes that long
_STEPS_FOR_A_FAULT = 12
_MEMORY = 64 << 20  # so much may a rank take that is to run out of memory
_AT_ONCE = ("exception", "exit3", "exit0")
_ANYWHERE = ("kill", "memory", "os_exit", "segfault", "stop")
KINDS = (*_AT_ONCE, *_ANYWHERE)
MORE_KINDS = ("hang", "slow", "launcher")
"""A rank that hangs, also after the last exchange, in a commit or in an exit handler; a slow start; hvdliterun is killed."""
_STALL_SECONDS = ("2", "5")
"""When a wait is reported, and when the rank that hangs has failed."""


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


def choose(
    seed: int, count: int, ranks: int = RANKS, in_a_job: int = IN_A_JOB, among: Sequence[str] = KINDS
) -> list[list[Fault]]:
    """Return the faults of a run, by job. The same seed gives the same faults.

    Args:
        seed, count: What is chosen.
        ranks: They strike the first so many ranks.
        in_a_job: So many happen in each job.
        among: The kinds, each of which comes once at first.
    """
    rng = random.Random(seed)
    kinds = [*among]
    rng.shuffle(kinds)
    kinds += rng.choices(kinds, k=count)
    return [_of_a_job(rng, kinds[first : min(first + in_a_job, count)], ranks) for first in range(0, count, in_a_job)]


def _of_a_job(rng: random.Random, kinds: list[str], ranks: int) -> list[Fault]:
    """Draw the faults of one job. A third one before the next commit would end it: then it is drawn again."""
    while True:
        steps = rng.sample(range(1, steps_of(len(kinds))), len(kinds))
        faults = [_draw(rng, kind, step, ranks, steps_of(len(kinds))) for kind, step in zip(kinds, steps, strict=True)]
        before = Counter((fault.step - (fault.place == "commit")) // 2 for fault in faults if fault.kind != "slow")
        if max(before.values()) < FRUITLESS:
            return faults


def steps_of(faults: int) -> int:
    """Return how many steps a training with so many faults has."""
    return max(STEPS, _STEPS_FOR_A_FAULT * faults)


def _draw(rng: random.Random, kind: str, step: int, ranks: int, last: int) -> Fault:
    place = rng.choice(["step", "exchanged", "commit", *(["end", "exit"] if kind == "hang" else [])])
    rank = rng.randrange(ranks)
    if kind == "slow":
        return Fault(kind, rank, 0, "begin", 0)
    if place in ("end", "exit"):
        return Fault(kind, rank, last, place, 0)
    if place == "commit":
        rank, step = 0, step + step % 2  # rank 0 writes what is committed; some trainings commit each second step
    return Fault(kind, rank, step, place, rng.choice([0, rng.randrange(1, 300)]) if kind in _ANYWHERE else 0)


def undisturbed(steps: int, width: int = 1000, changes: Sequence[tuple[int, int]] = ()) -> str:
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


def memory_group() -> Path | None:
    """Make a control group in which the kernel kills a process that takes more than 64 MiB; None if none can be made here."""
    name = f"hvdlite.test.{uuid.uuid4().hex}"
    for parent, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(parent, name)
        try:
            group.mkdir()
        except OSError:  # this kernel has groups of the other version, or this user may make none
            continue
        try:
            if (group / limit).exists():  # else it makes a file, or the group has no memory controller
                (group / limit).write_text(str(_MEMORY))
                with contextlib.suppress(OSError):
                    (group / "memory.swap.max").write_text("0")
                return group
        except OSError:
            pass
        group.rmdir()
    return None


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
        self._steps, self._limit = steps_of(len(faults)), LIMIT * max(1.0, len(faults) / IN_A_JOB)
        self._group = memory_group()
        words = ",".join(f"{number}.{fault}" for number, fault in enumerate(faults))
        environ = {
            "COUNTER_STEPS": str(self._steps),
            "COUNTER_MEMORY": str(self._group or ""),
            "COUNTER_FOLDER": str(folder),
            "COUNTER_FAULTS": words,
            "COUNTER_EVERY": str(every),
            "COUNTER_TELL": "starts too",
            "HVDLITE_STOPPED_SECONDS": "1.5",
        }
        kinds = {fault.kind for fault in faults}
        options = ["-np", str(RANKS), "--min-np", str(fewest), "--blacklist-cooldown-range", "0.05", "0.1"]
        if "launcher" in kinds:
            options += ["--state", str(folder / "state")]
        if "hang" in kinds:
            report, end = _STALL_SECONDS
            options += ["--stall-check-warning-time-seconds", report, "--stall-check-shutdown-time-seconds", end]
        self._words, self._environ = [*options, "python", str(PROGRAMS / "elastic_counter.py")], environ
        self._every = every
        self.started = Started(self._words, environ)
        self.recoveries = 0
        """How often ranks have gone on in their processes."""
        self.seconds: dict[str, list[float]] = {}
        """The seconds from each fault to the next finished step, by kind; faults after the last step have none."""

    def end(self) -> list[str]:
        """Wait for the end. Return all that was wrong, as texts."""
        try:
            return self._end()
        finally:
            if self._group is not None:
                with contextlib.suppress(OSError):  # a process that is left is in it: that is told
                    self._group.rmdir()

    def _end(self) -> list[str]:
        out, wrong = "", []
        kills = sorted(fault.step for fault in self._faults if fault.kind == "launcher")
        while True:
            try:
                ended = self.started.end(self._limit)
            except Exception as error:
                self.started.process.kill()
                return [f"it has not come to its end: {error}"]
            out += ended.out
            self.recoveries += ended.err.count(" go on in their processes")
            if ended.code != -signal.SIGKILL or not kills:
                break
            if kills.pop(0) > self._every:  # it has committed something
                wrong += [] if self._goes_on() else ["it has begun anew after hvdliterun was killed"]
            else:
                self.started = Started(self._words, self._environ)
        self._measure(out)
        said = [line.partition("] ")[2] for line in ended.out.splitlines() if " steps, counted " in line]
        once = repr({np.int64(1)})
        steps = self._steps
        found = re.findall(r"resets (\[.*\])", said[-1]) if said else []
        changes: list[tuple[int, int]] = ast.literal_eval(found[0]) if found and self._fewest < RANKS else []
        sizes = [RANKS, *(size for step, size in changes if 0 < step < steps)]
        expected = (
            f"{steps} steps, counted {once} times and {steps} in all, sizes {[size for size, _ in groupby(sizes)]}, "
            f"resets {changes}, weights {undisturbed(steps, changes=changes)}"
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

    def _goes_on(self) -> bool:
        """Start the same command again. Return whether it says that it goes on."""
        self.started = Started(self._words, self._environ)
        assert self.started.process.stderr is not None
        return "It goes on from commit number" in self.started.process.stderr.readline()

    def _measure(self, out: str) -> None:
        begins, finished = (
            sorted(float(at) for at in re.findall(rf"{words} at ([\d.]+)", out)) for words in ("begins", "ranks")
        )
        for path in self._folder.glob("fault.*"):
            begun = path.stat().st_mtime
            again = next((at for at in begins if at > begun), float("inf"))
            if at := next((at for at in finished if at > again), None):
                self.seconds.setdefault(path.name.rpartition(".")[2], []).append(at - begun)

    @property
    def restarts(self) -> int:
        """How often the training has started, less one."""
        starts = self._folder / "starts"
        return len(re.findall(r"^.+$", starts.read_text(), re.M)) - 1 if starts.exists() else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/faults --elastic", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="the same seed gives the same faults")
    parser.add_argument("--count", type=int, required=True, help="how many")
    parser.add_argument("--in-a-job", type=int, default=IN_A_JOB, help=f"how many in each training ({IN_A_JOB})")
    parser.add_argument("--fewest", type=int, default=RANKS, help=f"go on with so many ranks ({RANKS})")
    options = parser.parse_args()
    if options.count < 1 or options.in_a_job < 1:
        parser.error("--count and --in-a-job: expected 1 or more")
    if not 1 <= options.fewest <= RANKS:
        parser.error(f"--fewest: expected 1 to {RANKS}")
    group = memory_group()
    if group is None:
        print("No control group can be made here: a rank that runs out of memory is killed by SIGKILL instead.")
    else:
        group.rmdir()
    bad, done, begun, restarts, recoveries = 0, 0, time.monotonic(), 0, 0
    seconds: dict[str, list[float]] = {}
    chosen = choose(options.seed, options.count, options.fewest, options.in_a_job, [*KINDS, *MORE_KINDS])
    try:
        for number, faults in enumerate(chosen):
            with tempfile.TemporaryDirectory() as folder:
                training = Training(faults, Path(folder), every=1 + number % 2, fewest=options.fewest)
                watch = threading.Thread(target=_show, args=(Path(folder), training, done, options.count), daemon=True)
                watch.start()
                wrong = training.end()
                watch.join()
                restarts += training.restarts
                recoveries += training.recoveries
                for kind, each in training.seconds.items():
                    seconds.setdefault(kind, []).extend(each)
            done += len(faults)
            bad += bool(wrong)
            if wrong:
                print(f"{' '.join(map(str, faults))}\n" + "\n".join(f"    {text}" for text in wrong))
            print(
                f"{done}/{options.count} faults, {restarts} restarts, {recoveries} times gone on in the processes, "
                f"{bad} trainings wrong, {time.monotonic() - begun:.0f} s",
                flush=True,
            )
    finally:  # also if somebody presses Ctrl-C
        print("seconds from a fault to the next finished step: number, median, 99th percentile")
        for kind, each in sorted(seconds.items()):
            print(f"  {kind:10} {len(each):5} {np.median(each):8.3f} {np.percentile(each, 99):8.3f}")
    return 1 if bad else 0


def _show(folder: Path, training: Training, before: int, count: int) -> None:
    """Say every ten seconds how many faults have happened in a training that lasts."""
    while True:
        try:
            training.started.process.wait(10.0)
            return
        except subprocess.TimeoutExpired:
            print(
                f"    {before + len([*folder.glob('fault.*')])}/{count} faults have happened; hvdliterun: "
                f"{_size_of(training.started.process.pid)}",
                flush=True,
            )


def _size_of(pid: int) -> str:
    """Return the memory and the open descriptors of a process, in words."""
    with contextlib.suppress(OSError, StopIteration):
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        memory = next(line.split()[1] for line in status if line.startswith("VmRSS"))
        return f"{int(memory) / 1024:.1f} MiB, {len(os.listdir(f'/proc/{pid}/fd'))} descriptors"
    return "gone"


if __name__ == "__main__":
    sys.exit(main())
