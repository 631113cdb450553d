"""Training steps: what exchanging the gradients adds to them, or takes off."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from tqdm import tqdm

from benchmarks.backends import start_gloo, start_horovod
from benchmarks.checks import check_weights
from benchmarks.figures import mpi_in_use, summary, until_all_are_done
from benchmarks.models import Workload, parameters_of, workloads
from benchmarks.plan import ALONE, ALONE_FUSED, FLAT, VARIANTS
from benchmarks.variants import Missing, Variant, make

WARM_UP = 3


def measure(names: Sequence[str], rounds: int, tiny: bool, progress: bool) -> dict[str, Any]:
    """Train all variants on this rank.

    Args:
        names: Of `plan.WORKLOADS`.
        rounds: How many timed steps each variant makes.
        tiny: With few parameters.
        progress: Whether rank 0 shows how far it is.

    Returns:
        ``figures``: one entry for each workload and variant; ``skipped``: reasons by variant; ``mpi``.
    """
    start_gloo()
    horovod = start_horovod()
    figures: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for name in names:
        workload = workloads(tiny)[name]
        torch.manual_seed(0)
        initial = workload.model()
        variants: dict[str, Variant] = {}
        for variant in VARIANTS:
            try:
                variants[variant] = make(variant, initial, workload.optimizer, horovod)
            except Missing as reason:
                skipped[variant] = str(reason)
        times = _interleaved(variants, workload, rounds, tqdm_label=name if progress else None)
        # Each as the way that it went from the start, which is the same for all.
        ways = {variant: _weights(trained.model) - _weights(initial) for variant, trained in variants.items()}
        deviations = {variant: _distance(ways[variant], ways[FLAT]) for variant in variants}
        spreads = {variant: _spread(ways[variant]) for variant in variants}
        together = [variant for variant in variants if variant not in (ALONE, ALONE_FUSED)]
        check_weights({f"{name}: {variant}, against {FLAT}": deviations[variant] for variant in together})
        check_weights({f"{name}: {variant}, rank against rank": spreads[variant] for variant in together})
        results = {variant: summary(until_all_are_done(seconds)) for variant, seconds in times.items()}
        for variant, figure in results.items():
            figures.append(
                {
                    **{"workload": name, "parameters": parameters_of(initial), "ranks": MPI.COMM_WORLD.size},
                    **{"variant": variant, **figure, "ratio": figure["median"] / results[ALONE]["median"]},
                    **{"deviation": deviations[variant], "rank_spread": spreads[variant]},
                }
            )
    return {"figures": figures, "skipped": skipped, "mpi": mpi_in_use()}


def _interleaved(
    variants: dict[str, Variant], workload: Workload, rounds: int, tqdm_label: str | None
) -> dict[str, list[float]]:
    """This rank's seconds in each step, by variant."""
    comm = MPI.COMM_WORLD
    times: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    generator = torch.Generator().manual_seed(1 + comm.rank)
    hidden = tqdm_label is None or comm.rank > 0
    for turn in tqdm(range(WARM_UP + rounds), tqdm_label, unit="round", leave=False, disable=hidden):
        batch = workload.batch(generator)
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            comm.Barrier()
            start = time.perf_counter()
            variants[name].step(batch)
            elapsed = time.perf_counter() - start
            if turn >= WARM_UP:
                times[name].append(elapsed)
    comm.Barrier()
    return times


def _weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])


def _distance(way: torch.Tensor, other: torch.Tensor) -> float:
    """How far weights are from others, relative to the way of these; the largest of all ranks."""
    own = float((way - other).norm() / other.norm())
    # Not MPI.MAX, which may drop the "not a number" of weights that exploded.
    return float(np.max(MPI.COMM_WORLD.allgather(own)))


def _spread(way: torch.Tensor) -> float:
    """How far any rank's weights are from rank 0's."""
    first = way.numpy().copy()
    MPI.COMM_WORLD.Bcast(first)
    return _distance(way, torch.from_numpy(first))
