"""Measures the time of a blocking allreduce in place, by size, dtype and number of ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from mpi4py import MPI
from tqdm import tqdm

from benchmarks.backends import start_gloo, start_horovod
from benchmarks.checks import addend, check_sum, true_sum
from benchmarks.collectives import DTYPES, Peer, peers
from benchmarks.figures import in_turn, mpi_in_use, summary, until_all_are_done
from benchmarks.plan import MPI_OWN


def measure(kinds: Sequence[str], sizes: Sequence[int], rounds: int, progress: bool) -> dict[str, Any]:
    """Measure all peers on this rank.

    Args:
        kinds: Names in `plan.KINDS`.
        sizes: The sizes of the tensor in bytes.
        rounds: The number of turns of each peer.
        progress: Whether rank 0 shows a progress bar.

    Returns:
        ``figures``: one entry for each kind, size and peer; ``skipped``: reasons by peer; ``mpi``: the result of `mpi_in_use`.
    """
    start_gloo()
    horovod = start_horovod()
    comm = MPI.COMM_WORLD
    figures: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    cases = [(kind, nbytes) for kind in kinds for nbytes in sizes]
    bar = tqdm(cases, f"allreduce, {comm.size} ranks", unit="case", leave=False, disable=not progress or comm.rank > 0)
    for kind, nbytes in bar:
        elements = max(1, nbytes // DTYPES[kind].itemsize)
        found, missing = peers(kind, elements, horovod)
        skipped |= missing
        times = _interleaved(found, elements, rounds, repeats=min(50, max(1, 2**24 // nbytes)))
        medians = {peer: summary(until_all_are_done(seconds)) for peer, seconds in times.items()}
        for peer, figure in medians.items():
            figures.append(
                {
                    **{"ranks": comm.size, "kind": kind, "bytes": nbytes, "elements": elements, "peer": peer},
                    **figure,
                    "ratio": figure["median"] / medians[MPI_OWN]["median"],
                    "bytes_per_second": nbytes / figure["median"],
                }
            )
    return {"figures": figures, "skipped": skipped, "mpi": mpi_in_use()}


def _interleaved(found: Mapping[str, Peer], elements: int, rounds: int, repeats: int) -> dict[str, list[float]]:
    """Let the peers take turns, and return this rank's seconds in each call, by peer."""
    comm = MPI.COMM_WORLD
    times: dict[str, list[float]] = {name: [] for name in found}
    dtypes = {peer.data.dtype for peer in found.values()}
    mine = {dtype: addend(comm.rank, elements, dtype) for dtype in dtypes}
    expected = {dtype: true_sum(comm.size, elements, dtype) for dtype in dtypes}
    names = list(found)
    for turn in range(rounds):
        for name in in_turn(names, turn):  # gloo's threads may still be busy: each peer comes after gloo in turn
            peer = found[name]
            for repeat in range(repeats + 1):
                peer.data.copy_(mine[peer.data.dtype])
                comm.Barrier()
                start = time.perf_counter()
                peer.call()
                elapsed = time.perf_counter() - start
                if repeat > 0:  # the first call warms up
                    times[name].append(elapsed)
            if peer.is_sum:
                check_sum(name, peer.data, expected[peer.data.dtype])
    return times
