"""`Autotune`: a search for the fastest way to exchange gradients, while training goes on.

Each plan is tried for some steps, one plan after the other, in several rounds, because the speed of a machine drifts. A plan
wins only if it is clearly faster than the default plan. If no plan is, the default stays.
"""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdlite.protocols import Plan
from hvdlite.ranks.log import tell

SETTLE_STEPS, MEASURED_STEPS, ROUNDS = 2, 8, 3
"""The steps after a change of plans that are not measured, the steps that are, and the rounds."""
CLEARLY = 0.98
"""A plan wins if its time is below this fraction of the default's."""


class Candidate(NamedTuple):
    """A plan, and its name for messages."""

    name: str
    plan: Plan


def candidates(
    default: Plan, bucketings: Sequence[tuple[tuple[int, ...], ...]], several_hosts: bool
) -> list[Candidate]:
    """Return the plans that are worth a trial.

    Args:
        default: The plan that is used without a search; the first candidate.
        bucketings: Ways to deal the gradients out to buckets, which overlap with the backward pass.
        several_hosts: Whether gradients travel between hosts.
    """
    found = [Candidate("default", default)]
    if several_hosts:
        sizes = [size for size in (2**20, 4 * 2**20, 16 * 2**20, 64 * 2**20) if size != default.message_bytes]
        found += [Candidate(f"{size >> 20} MiB messages", default._replace(message_bytes=size)) for size in sizes]
    else:
        sizes = [size for size in (2**15, 2**16, 2**17, 2**18, 2**19) if size != default.chunk_bytes]
        found += [Candidate(f"{size >> 10} KiB chunks", default._replace(chunk_bytes=size)) for size in sizes]
    if default.buckets:
        found.append(Candidate("no overlap", default._replace(buckets=())))
    for buckets in bucketings:
        if buckets and buckets != default.buckets:
            found.append(Candidate(f"overlap, {len(buckets)} buckets", default._replace(buckets=buckets)))
    return found


class Autotune:
    """A search, on one rank. All ranks make one with the same plans, and call `step` at each step.

    Args:
        plans: The first one is the default.
        agree: Returns the largest of the numbers of all ranks.
        log: The path of a CSV file for what was tried; nothing is written if it is empty. Set on one rank only.
        talks: Whether to print the outcome. Set on one rank only.
        clock: Returns the time in seconds.

    Attributes:
        current: The plan to use now.
    """

    def __init__(
        self,
        plans: Sequence[Candidate],
        agree: Callable[[float], float],
        log: str = "",
        talks: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._plans = plans
        self._agree = agree
        self._log = log
        self._talks = talks
        self._clock = clock
        self._trials = [(number, index) for number in range(ROUNDS) for index in range(len(plans))]
        self._medians: list[list[float]] = [[] for _ in plans]
        self._steps: list[float] = []
        self._last: float | None = None
        self._trial = 0
        self.current = plans[0].plan
        if log:
            self._write(["round", "plan", "chunk_bytes", "message_bytes", "buckets", "median_seconds"], "w")

    @property
    def done(self) -> bool:
        """Whether the search is over."""
        return self._trial == len(self._trials)

    def step(self) -> bool:
        """Note that a step begins its exchange. Return whether `current` is another plan now."""
        if self.done:
            return False
        now = self._clock()
        if self._last is not None:
            self._steps.append(now - self._last)
        self._last = now
        if len(self._steps) < SETTLE_STEPS + MEASURED_STEPS:
            return False
        number, index = self._trials[self._trial]
        median = self._agree(statistics.median(self._steps[SETTLE_STEPS:]))
        self._medians[index].append(median)
        self._record(number, index, median)
        self._trial += 1
        self._steps, self._last = [], None
        before = self.current
        self.current = self._choose() if self.done else self._plans[self._trials[self._trial][1]].plan
        return self.current != before

    def _choose(self) -> Plan:
        times = [statistics.median(medians) for medians in self._medians]
        best = min(range(len(times)), key=times.__getitem__)
        ratio = times[best] / times[0]
        wins = ratio < CLEARLY
        chosen = self._plans[best if wins else 0]
        if self._log:
            self._write(["chosen", chosen.name, "", "", "", statistics.median(self._medians[best if wins else 0])])
        if self._talks:
            rest = min(range(1, len(times)), key=times.__getitem__, default=0)
            text = (
                f"{chosen.name}: a step takes {ratio:.2f} of its time without"
                if wins
                else (
                    f"the default stays; the best of the others ({self._plans[rest].name}) took {times[rest] / times[0]:.2f} "
                    "of its time"
                )
            )
            record = f" Record: {Path(self._log).resolve()}" if self._log else ""
            tell("autotune", f"hvdlite: autotune has tried {len(times)} plans: {text}.{record}", 0)
        return chosen.plan

    def _record(self, number: int, index: int, median: float) -> None:
        if self._log:
            name, plan = self._plans[index]
            self._write([number, name, plan.chunk_bytes, plan.message_bytes, max(1, len(plan.buckets)), median])

    def _write(self, row: Sequence[object], mode: str = "a") -> None:
        with Path(self._log).open(mode, newline="") as file:
            csv.writer(file).writerow(row)
