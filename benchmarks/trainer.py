"""Trains one variant in a job of its own, or sums tensors. `benchmarks.steps` and `benchmarks.against` give the orders."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

import hvdlite
from benchmarks.backends import start_gloo, start_horovod
from benchmarks.checks import addend, check_sum, true_sum
from benchmarks.collectives import DTYPES
from benchmarks.figures import mpi_in_use
from benchmarks.models import Workload, parameters_of, workloads
from benchmarks.plan import DDP, DDP_TUNED, HOROVOD, ZERO
from benchmarks.turns import orders
from benchmarks.variants import Missing, Variant, make


def measure(name: str, address: str, variant: str, tiny: bool) -> dict[str, Any]:
    """Follow the orders of `benchmarks.steps` or `benchmarks.against` on this rank, and send the answers back.

    Args:
        name: The name of the job.
        address: The address of the program that gives the orders.
        variant: A name in `plan.VARIANTS`.
        tiny: Whether to use models with few parameters.

    Returns:
        An empty dictionary: the answers go to the program that gives the orders.
    """
    comm = MPI.COMM_WORLD
    if variant in (DDP, DDP_TUNED, ZERO):
        start_gloo()
    horovod = start_horovod() if variant == HOROVOD else None
    trained: _Trained | None = None
    summed: _Summed | None = None
    for line, order in orders(address, name, comm.rank):
        match order.pop("do"):
            case "begin":
                trained = None  # frees its memory before the next one is made
                try:
                    trained = _Trained(variant, workloads(tiny)[order["workload"]], horovod)
                    line.say({"parameters": trained.parameters, "mpi": mpi_in_use()})
                except Missing as reason:
                    line.say({"missing": str(reason)})
            case "step":
                assert trained is not None
                line.say([trained.step() for _ in range(order["count"])])
            case "save":
                assert trained is not None
                np.save(order["path"].format(rank=comm.rank), trained.way()[:: order["every"]])
                line.say(None)
            case "tensor":
                summed = _Summed(order["kind"], order["bytes"])
                line.say(None)
            case "calls":
                assert summed is not None
                line.say(summed.calls(order["repeats"]))
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
        way: np.ndarray[Any, Any] = _weights(self._variant.model) - self._start
        return way


class _Summed:
    """A tensor of a kind in `plan.KINDS` that hvdlite sums over the ranks."""

    def __init__(self, kind: str, nbytes: int) -> None:
        dtype, comm = DTYPES[kind], MPI.COMM_WORLD
        elements = max(1, nbytes // dtype.itemsize)
        self._data = torch.empty(elements, dtype=dtype)
        self._given = self._data.numpy() if kind.endswith("NumPy") else self._data
        self._mine, self._sum = addend(comm.rank, elements, dtype), true_sum(comm.size, elements, dtype)

    def calls(self, repeats: int) -> list[float]:
        """Sum the tensor, and return this rank's seconds in each call. One more call before these warms up.

        Raises:
            WrongResult: The last sum is wrong.
        """
        seconds = []
        for _ in range(repeats + 1):
            self._data.copy_(self._mine)
            MPI.COMM_WORLD.Barrier()
            start = time.perf_counter()
            hvdlite.allreduce(self._given, hvdlite.Sum, inplace=True)
            seconds.append(time.perf_counter() - start)
        check_sum("hvdlite", self._data, self._sum)
        return seconds[1:]


def _weights(model: torch.nn.Module) -> np.ndarray[Any, Any]:
    return np.asarray(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
