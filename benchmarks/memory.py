"""Measures the memory of training, for one variant in a job of its own."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from mpi4py import MPI

from benchmarks.backends import start_gloo, start_horovod
from benchmarks.models import parameters_of, workloads
from benchmarks.variants import Missing, make

STEPS = 6
_PERIOD = 0.02  # seconds between two calls of `pss`; a call takes 8 ms, during which no memory can be allocated


def measure(name: str, variant: str, tiny: bool) -> dict[str, Any]:
    """Train one variant of a workload for a few steps on this rank.

    Returns:
        The bytes of each rank: ``kept`` after and ``peak`` during training, without the memory before, and ``process_peak``
        with it; or ``skipped`` with the reason.
    """
    start_gloo()
    horovod = start_horovod()
    comm = MPI.COMM_WORLD
    try:
        _train(name, variant, True, horovod)
        before = pss()
        with _peak() as peak:
            parameters, after = _train(name, variant, tiny, horovod)
    except Missing as reason:
        return {"skipped": str(reason)}
    return {
        **{"workload": name, "variant": variant, "parameters": parameters, "ranks": comm.size},
        **{"kept": comm.allgather(after - before), "peak": comm.allgather(peak[0] - before)},
        **{"process_peak": comm.allgather(peak[0])},
    }


def _train(name: str, variant: str, tiny: bool, horovod: ModuleType | None) -> tuple[int, int]:
    """Train a model from its start. Return its number of parameters, and the `pss` at the end of training."""
    workload = workloads(tiny)[name]
    torch.manual_seed(0)
    training = make(variant, workload.model(), workload.optimizer, horovod)
    generator = torch.Generator().manual_seed(1 + MPI.COMM_WORLD.rank)
    for _ in range(STEPS):
        training.step(workload.batch(generator))
    # Shared memory is divided among the processes that hold it, so all ranks measure while all of them hold it.
    MPI.COMM_WORLD.Barrier()
    ctypes.CDLL(None).malloc_trim(0)  # gives freed memory back to the system
    after = pss()
    MPI.COMM_WORLD.Barrier()
    return parameters_of(training.model), after


def pss() -> int:
    """Return the memory of this process in bytes (Pss). Shared memory is divided among the processes that share it."""
    found = re.search(r"^Pss:\s+(\d+) kB$", Path("/proc/self/smaps_rollup").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


@contextmanager
def _peak() -> Iterator[list[int]]:
    """Yield a list of one element: the largest `pss` that a thread sees while the body runs."""
    largest = [pss()]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_PERIOD):
            largest[0] = max(largest[0], pss())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield largest
    finally:
        done.set()
        thread.join()
