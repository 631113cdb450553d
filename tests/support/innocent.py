"""Jobs in which nothing is wrong, and something takes long: ``scripts/faults --innocent --seed 1 --count 20``.

None of them may be reported, ended, or started again: hvdliterun says nothing, and ends well. Every other job is elastic.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.support.jobs import PROGRAMS, Started

RANKS = 3
LONG = 20.0
"""Seconds for what takes long: more than any limit within hvdlite, but those that count waits, of 60 s and more."""
PAUSE = 5
"""Seconds for which a process is stopped."""
KINDS = ("start", "first", "evaluation", "compile", "stop", "stop_guard", "swap", "save", "exit")
"""What takes long: a rank's start, its first batch; what rank 0 evaluates; what all compile, holding Python's lock; a rank, or
its guard, is stopped for 5 s, or for most of ten seconds, as one that swaps; a rank's last save; its exit."""
_LIMIT = 180.0


@dataclass(frozen=True)
class Innocent:
    """A job: what takes long, on which rank, and whether the job is elastic."""

    kind: str
    rank: int
    is_elastic: bool

    def run(self) -> list[str]:
        """Run the job. Return all that was wrong."""
        options = ["--min-np", "2"] if self.is_elastic else []
        words = ["-np", str(RANKS), *options, str(PROGRAMS / "innocent.py"), self.kind, str(self.rank)]
        job = Started(words, {"HVDLITE_ADVICE": "0", "OMP_NUM_THREADS": "1"})
        try:
            ended = job.end(_LIMIT)
        except Exception as error:
            job.process.kill()
            return [f"it has not come to its end: {error}"]
        wrong = [f"exit code {ended.code}"] if ended.code else []
        if ended.err:
            wrong.append(f"it was reported: {ended.err[-1500:]}")
        for rank in range(RANKS):
            if f"rank {rank} of {RANKS} has made 40 steps, {40 * RANKS}\n" not in ended.out:
                wrong.append(f"rank {rank} has not made its steps: {ended.out[-500:]}")
        return wrong


def choose(seed: int, count: int) -> list[Innocent]:
    """Return the jobs of a run: each kind once, and then again; the same seed gives the same jobs."""
    rng = random.Random(seed)
    return [Innocent(KINDS[number % len(KINDS)], rng.randrange(RANKS), number % 2 == 1) for number in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/faults --innocent", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="the same seed gives the same jobs")
    parser.add_argument("--count", type=int, default=20, help="how many (20)")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    options = parser.parse_args()
    bad, begun, jobs = 0, time.monotonic(), choose(options.seed, options.count)
    with ThreadPoolExecutor(options.jobs) as pool:
        for job, wrong in zip(jobs, pool.map(Innocent.run, jobs), strict=True):
            bad += bool(wrong)
            print("\n    ".join([f"{job}: {'wrong' if wrong else 'nothing was said'}", *wrong]), flush=True)
    print(f"{options.count} jobs in which nothing is wrong, {bad} false alarms, {time.monotonic() - begun:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
