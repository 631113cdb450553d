"""Measures the time that the gradient exchange adds to a training step. Each variant runs in a job of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.checks import check_weights
from benchmarks.figures import in_turn, summary
from benchmarks.plan import ALONE, ALONE_TUNED, FLAT, STEP_RANKS, VARIANTS
from benchmarks.turns import Players, players

WARM_UP = 3


def measure(names: Sequence[str], variants: Sequence[str], rounds: int, tiny: bool, progress: bool) -> dict[str, Any]:
    """Train the variants in turn.

    Args:
        names: Names in `plan.WORKLOADS`.
        variants: Names in `plan.VARIANTS`. The references `ALONE` and `FLAT` are always trained.
        rounds: The number of timed steps of each variant.
        tiny: Whether to use models with few parameters.
        progress: Whether to show a progress bar.

    Returns:
        ``figures``: one entry for each workload and variant; ``skipped``: reasons by variant; ``mpi``: the result of
        `mpi_in_use`.

    Raises:
        JobFailed: The job of a variant has failed.
        WrongResult: The weights of a variant differ from the reference, or between ranks.
    """
    figures: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    mpi: dict[str, str] = {}
    chosen = [variant for variant in VARIANTS if variant in variants or variant in (ALONE, FLAT)]
    with players("trainer", STEP_RANKS, {variant: {"variant": variant, "tiny": tiny} for variant in chosen}) as jobs:
        for workload in names:
            parameters = 0
            there = []
            for variant in chosen:
                began = jobs.ask(variant, do="begin", workload=workload)[0]
                if "missing" in began:
                    skipped[variant] = began["missing"]
                else:
                    there.append(variant)
                    parameters, mpi = began["parameters"], began["mpi"]
            times = interleaved(jobs, there, rounds, workload if progress else None)
            deviations, spreads = compare(jobs, there, FLAT)
            together = [variant for variant in there if variant not in (ALONE, ALONE_TUNED)]
            check_weights({f"{workload}: {variant}, against {FLAT}": deviations[variant] for variant in together})
            check_weights({f"{workload}: {variant}, rank against rank": spreads[variant] for variant in together})
            results = {variant: summary(seconds) for variant, seconds in times.items()}
            for variant, figure in results.items():
                figures.append(
                    {
                        **{"workload": workload, "parameters": parameters, "ranks": STEP_RANKS},
                        **{"variant": variant, **figure, "ratio": figure["median"] / results[ALONE]["median"]},
                        **{"deviation": deviations[variant], "rank_spread": spreads[variant]},
                    }
                )
    return {"figures": figures, "skipped": skipped, "mpi": mpi}


def interleaved(jobs: Players, names: Sequence[str], rounds: int, label: str | None) -> dict[str, list[float]]:
    """Let the variants take turns. Return the seconds of each timed step on the slowest rank, by variant."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in tqdm(range(WARM_UP + rounds), label, unit="round", leave=False, disable=label is None):
        for name in in_turn(names, turn):
            seconds = max(jobs.ask(name, do="step"))
            if turn >= WARM_UP:
                times[name].append(seconds)
    return times


def compare(jobs: Players, names: Sequence[str], reference: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return by name the largest distance of a rank's weights from those of the reference, and from rank 0 of the name."""
    deviations, spreads = {}, {}
    with tempfile.TemporaryDirectory() as folder:

        def ways(name: str) -> list[np.ndarray[Any, Any]]:
            jobs.ask(name, do="save", path=f"{folder}/{{rank}}.npy")
            return [np.load(f"{folder}/{rank}.npy") for rank in range(STEP_RANKS)]

        truth = ways(reference)
        for name in names:
            own = ways(name)
            # np.max keeps a NaN of weights that exploded; max() may drop it.
            deviations[name] = float(np.max([_distance(*pair) for pair in zip(own, truth, strict=True)]))
            spreads[name] = float(np.max([_distance(way, own[0]) for way in own]))
    return deviations, spreads


def _distance(way: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """Return the distance between two changes of the weights, relative to `other`."""
    return float(np.linalg.norm(way - other) / np.linalg.norm(other))
