"""Measures the time that the gradient exchange adds to a training step. Each variant runs in a job of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from tqdm import tqdm

from benchmarks.checks import check_weights
from benchmarks.figures import in_turn, summary
from benchmarks.plan import (
    ALONE,
    ALONE_SMALL,
    ALONE_TUNED,
    CHECK_STEPS,
    DDP_TUNED,
    FLAT,
    LARGE,
    LARGE_EVERY,
    STEP_RANKS,
    TURN_STEPS,
    VARIANTS,
)
from benchmarks.turns import Players, players
from benchmarks.ways import Ways, spread

Times = dict[str, list[float]]


def measure(
    names: Sequence[str], variants: Sequence[str], rounds: int, large_rounds: int, tiny: bool, progress: bool
) -> Iterator[dict[str, Any]]:
    """Train the variants in turn, and yield the figures of each workload as soon as they are there.

    Args:
        names: Workloads, by the names that `plan.WORKLOADS` shows.
        variants: Variants, by the names that `plan.VARIANTS` shows. The reference `ALONE_TUNED` is always trained, and `FLAT`
            for the first steps.
        rounds: The number of timed turns of each variant.
        large_rounds: The same for workloads in `plan.LARGE`.
        tiny: Whether to use models with few parameters.
        progress: Whether to show a progress bar.

    Yields:
        ``figures``: one entry for each variant; ``skipped``: reasons by variant; ``mpi``: the result of `mpi_in_use`.

    Raises:
        JobFailed: The job of a variant has failed.
        WrongResult: The weights of a variant differ from the reference, or between ranks.
    """
    timed = [variant for variant in VARIANTS.values() if variant in variants or variant == ALONE_TUNED]
    # The exchange by hand comes first: its weights are the reference.
    settings = {variant: {"variant": variant, "tiny": tiny} for variant in dict.fromkeys([FLAT, *timed])}
    small = [name for name in names if name not in LARGE]
    if small:
        with players("trainer", STEP_RANKS, settings) as jobs:
            for name in small:
                with closing(_Training(name)) as training:
                    for variant in settings:
                        training.begin(jobs, variant)
                    there = [variant for variant in timed if variant not in training.skipped]
                    times = interleaved(jobs, there, rounds, name if progress else None)
                    for variant in there:
                        training.end(jobs, variant)
                    yield training.results(times)
    for name in names:
        if name in LARGE:
            with closing(_Training(name)) as training:
                yield training.results(_one_by_one(training, settings, timed, large_rounds, progress))


def interleaved(jobs: Players, names: Sequence[str], rounds: int, label: str | None) -> Times:
    """Let the variants take turns. Return the seconds of each timed step on the slowest rank, by variant."""
    times: Times = {name: [] for name in names}
    for turn in tqdm(range(rounds), label, unit="round", leave=False, disable=label is None):
        for name in in_turn(names, turn):
            times[name] += _steps(jobs, name, TURN_STEPS)
    return times


def _one_by_one(
    training: _Training, settings: Mapping[str, Mapping[str, Any]], timed: Sequence[str], rounds: int, progress: bool
) -> Times:
    """Let the variants take turns, each in a job that ends with its turn. So memory holds one variant at a time."""
    times: Times = {}
    turns = [(turn, variant) for turn in range(rounds) for variant in in_turn(timed, turn)]
    turns.insert(0, (-1, FLAT))
    bar = tqdm(turns, training.workload, unit="job", leave=False, disable=not progress)
    for turn, variant in bar:
        bar.set_postfix_str(variant)
        if variant in training.skipped:
            continue
        with players("trainer", STEP_RANKS, {variant: settings[variant]}) as jobs:
            training.begin(jobs, variant, compare=turn < 1)
            if turn >= 0 and variant not in training.skipped:
                times[variant] = times.get(variant, []) + _steps(jobs, variant, TURN_STEPS)
                if turn == rounds - 1:
                    training.end(jobs, variant)
    return {variant: times[variant] for variant in timed if variant in times}


def _steps(jobs: Players, name: str, count: int) -> list[float]:
    """Make steps, and return the seconds of each on the slowest rank."""
    return [max(ranks) for ranks in zip(*jobs.ask(name, do="step", count=count), strict=True)]


class _Training:
    """One workload, trained by all variants: what is known of it, and whether the weights are right.

    Args:
        workload: The name of the workload.

    Attributes:
        workload: The name of the workload.
        skipped: Why a variant is not there, by its name.
    """

    def __init__(self, workload: str) -> None:
        self.workload = workload
        self.skipped: dict[str, str] = {}
        self._parameters, self._mpi = 0, {"library": ""}
        every = LARGE_EVERY if workload in LARGE else 1
        self._first, self._last = Ways(every), Ways(every)
        self._deviations: dict[str, float] = {}
        self._drifts: dict[str, float] = {}
        self._spreads: dict[str, float] = {}

    def close(self) -> None:
        """Remove the files."""
        self._first.close()
        self._last.close()

    def begin(self, jobs: Players, variant: str, compare: bool = True) -> None:
        """Make the model, and the first steps. Compare the weights with those of the first variant, which is `FLAT`."""
        began = jobs.ask(variant, do="begin", workload=self.workload)[0]
        if "missing" in began:
            self.skipped[variant] = began["missing"]
            return
        self._parameters, self._mpi = began["parameters"], began["mpi"]
        _steps(jobs, variant, CHECK_STEPS)
        if compare:
            self._deviations[variant], _ = self._first.compare(jobs, variant)
            self._check(variant, f"against {FLAT}", self._deviations[variant])

    def end(self, jobs: Players, variant: str) -> None:
        """Compare the weights with those of the other ranks, and of the first variant that exchanges."""
        if variant in _ALONE:
            self._spreads[variant] = spread(self._last.of(jobs, variant))
            return
        self._drifts[variant], self._spreads[variant] = self._last.compare(jobs, variant)
        self._check(variant, "rank against rank", self._spreads[variant])
        self._check(variant, f"against {self._last.reference}", self._drifts[variant])

    def _check(self, variant: str, what: str, deviation: float) -> None:
        if variant not in _ALONE:
            check_weights({f"{self.workload}: {variant}, {what}": deviation})

    def results(self, times: Times) -> dict[str, Any]:
        """Return what `measure` yields."""
        found = {variant: summary(seconds) for variant, seconds in times.items()}
        tuned, ddp = found[ALONE_TUNED]["median"], found.get(DDP_TUNED, {}).get("median")
        figures = [
            {
                **{"workload": self.workload, "parameters": self._parameters, "ranks": STEP_RANKS, "variant": variant},
                **{**figure, "reference": ALONE_TUNED, "ratio": figure["median"] / tuned},
                **({"to_ddp": figure["median"] / ddp} if ddp else {}),
                **{"deviation": self._deviations[variant], "rank_spread": self._spreads[variant]},
                **{"drift": self._drifts.get(variant), "seconds": times[variant]},
            }
            for variant, figure in found.items()
        ]
        return {"figures": figures, "skipped": self.skipped, "mpi": self._mpi}


_ALONE = (ALONE, ALONE_SMALL, ALONE_TUNED)
