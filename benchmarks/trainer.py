"""Trains one variant in a job of its own. `benchmarks.steps` tells the job when to make a step."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from benchmarks.backends import start_gloo, start_horovod
from benchmarks.figures import mpi_in_use
from benchmarks.models import Workload, parameters_of, workloads
from benchmarks.plan import DDP
from benchmarks.turns import orders
from benchmarks.variants import Missing, Variant, make


def measure(name: str, address: str, tiny: bool) -> dict[str, Any]:
    """Follow the orders of `benchmarks.steps` on this rank, and send the answers back.

    Args:
        name: A name in `plan.VARIANTS`.
        address: The address of the program that gives the orders.
        tiny: Whether to use models with few parameters.

    Returns:
        An empty dictionary: the answers go to the program that gives the orders.
    """
    comm = MPI.COMM_WORLD
    if name == DDP:
        start_gloo()
    horovod = start_horovod() if name == "Horovod" else None
    trained: _Trained | None = None
    for line, order in orders(address, name, comm.rank):
        match order.pop("do"):
            case "begin":
                trained = None  # frees its memory before the next one is made
                try:
                    trained = _Trained(name, workloads(tiny)[order["workload"]], horovod)
                    line.say({"parameters": trained.parameters, "mpi": mpi_in_use()})
                except Missing as reason:
                    line.say({"missing": str(reason)})
            case "step":
                assert trained is not None
                line.say(trained.step())
            case "save":
                assert trained is not None
                np.save(order["path"].format(rank=comm.rank), trained.way())
                line.say(None)
    return {}


class _Trained:
    """A variant in training, with its data and its initial weights."""

    def __init__(self, name: str, workload: Workload, horovod: Any) -> None:
        torch.manual_seed(0)
        model = workload.model()
        self.parameters = parameters_of(model)
        self._start = _weights(model)
        self._variant: Variant = make(name, model, workload.optimizer, horovod)
        self._batch = workload.batch
        self._generator = torch.Generator().manual_seed(1 + MPI.COMM_WORLD.rank)

    def step(self) -> float:
        """Make a step, and return its seconds on this rank. All ranks begin the step together."""
        batch = self._batch(self._generator)
        MPI.COMM_WORLD.Barrier()
        start = time.perf_counter()
        self._variant.step(batch)
        return time.perf_counter() - start

    def way(self) -> np.ndarray[Any, Any]:
        """Return the change of the weights by training, as a flat float32 array."""
        return _weights(self._variant.model) - self._start


def _weights(model: torch.nn.Module) -> np.ndarray[Any, Any]:
    return np.asarray(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
