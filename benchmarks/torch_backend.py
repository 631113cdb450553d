"""Measures the backend "hvdlite" of torch.distributed against gloo: its operations, and steps of DDP and FSDP2 over both."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm

import hvdlite_torch  # noqa: F401  (enters the backend)
from benchmarks.checks import WrongResult, addend, check_weights, true_sum
from benchmarks.figures import in_turn, mpi_in_use, summary, until_all_are_done
from benchmarks.plan import BACKENDS, GLOO

Groups = dict[str, dist.ProcessGroup]


def measure(sizes: Sequence[int], rounds: int, step_rounds: int, tiny: bool, progress: bool) -> dict[str, Any]:
    """Measure both backends on this rank.

    Args:
        sizes: The sizes of the tensors in bytes.
        rounds: The number of turns of each backend with each operation and size.
        step_rounds: The number of timed steps of each backend.
        tiny: Whether to use a small model.
        progress: Whether rank 0 shows a progress bar.

    Returns:
        ``figures``: one entry for each operation, size and backend; ``steps``: one for each way of training and backend;
        ``mpi``: the result of `mpi_in_use`.
    """
    dist.init_process_group("hvdlite")
    groups: Groups = {name: dist.new_group(backend=backend) for name, backend in BACKENDS.items()}
    quiet = not progress or dist.get_rank() > 0
    figures: list[dict[str, Any]] = []
    for name, make in tqdm(OPERATIONS.items(), "operations", leave=False, disable=quiet):
        for nbytes in sizes if name != "barrier" else sizes[:1]:
            calls = {backend: make(group, nbytes // 4) for backend, group in groups.items()}
            samples = _in_turns(calls, rounds, calls_in_a_row(nbytes))
            figures += _figures({"operation": name, "bytes": nbytes}, samples)
    steps: list[dict[str, Any]] = []
    for name, train in tqdm(TRAININGS.items(), "steps", leave=False, disable=quiet):
        trainings = {backend: train(group, tiny) for backend, group in groups.items()}
        samples = _in_turns({backend: step for backend, (step, _) in trainings.items()}, step_rounds, 1)
        ours, theirs = (weights() for _, weights in trainings.values())
        check_weights({name: float((ours - theirs).norm() / theirs.norm())})
        steps += _figures({"training": name}, samples)
    return {"figures": figures, "steps": steps, "skipped": {}, "mpi": mpi_in_use()}


def calls_in_a_row(nbytes: int) -> int:
    """Return how many calls of one backend follow each other in its turn."""
    return 100 if nbytes < 2**16 else 10 if nbytes <= 2**20 else 1


def _in_turns(calls: dict[str, Callable[[], object]], rounds: int, repeats: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-2, rounds):  # the first two turns are not counted
        for name in in_turn(list(calls), turn):
            MPI.COMM_WORLD.Barrier()
            begin = time.perf_counter()
            for _ in range(repeats):
                calls[name]()
            samples[name].append((time.perf_counter() - begin) / repeats)
    return {name: until_all_are_done(seconds[2:]) for name, seconds in samples.items()}


def _figures(what: dict[str, Any], samples: dict[str, list[float]]) -> list[dict[str, Any]]:
    reference = summary(samples[GLOO])["median"]
    return [
        {**what, "backend": name, **summary(seconds), "ratio": summary(seconds)["median"] / reference}
        for name, seconds in samples.items()
    ]


Make = Callable[[dist.ProcessGroup, int], Callable[[], object]]


def _checked(
    what: str, call: Callable[[], object], result: torch.Tensor, expected: torch.Tensor
) -> Callable[[], object]:
    """Call once, and compare the result."""
    call()
    if not torch.equal(result, expected):
        raise WrongResult(f"{what}: the result is not that of {expected.numel()} elements in closed form.")
    return call


def _all_reduce(group: dist.ProcessGroup, n: int) -> Callable[[], object]:
    size = dist.get_world_size()
    data = addend(dist.get_rank(), n, torch.float32)
    call = _checked("all_reduce", lambda: dist.all_reduce(data, group=group), data, true_sum(size, n, torch.float32))
    data.zero_()  # sums of sums would grow without end
    return call


def _broadcast(group: dist.ProcessGroup, n: int) -> Callable[[], object]:
    data = addend(dist.get_rank(), n, torch.float32)
    return _checked("broadcast", lambda: dist.broadcast(data, 0, group=group), data, addend(0, n, torch.float32))


def _all_gather(group: dist.ProcessGroup, n: int) -> Callable[[], object]:
    size = dist.get_world_size()
    mine, out = addend(dist.get_rank(), n, torch.float32), torch.empty(n * size)
    expected = torch.cat([addend(rank, n, torch.float32) for rank in range(size)])
    return _checked("all_gather", lambda: dist.all_gather_single(out, mine, group=group), out, expected)


def _reduce_scatter(group: dist.ProcessGroup, n: int) -> Callable[[], object]:
    size = dist.get_world_size()
    given, out = addend(dist.get_rank(), n, torch.float32).repeat(size), torch.empty(n)
    expected = true_sum(size, n, torch.float32)
    return _checked("reduce_scatter", lambda: dist.reduce_scatter_single(out, given, group=group), out, expected)


def _all_to_all(group: dist.ProcessGroup, n: int) -> Callable[[], object]:
    size = dist.get_world_size()
    given, out = addend(dist.get_rank(), n, torch.float32).repeat(size), torch.empty(n * size)
    expected = torch.cat([addend(rank, n, torch.float32) for rank in range(size)])
    return _checked("all_to_all", lambda: dist.all_to_all_single(out, given, group=group), out, expected)


def _ring(group: dist.ProcessGroup, n: int) -> Callable[[], object]:
    """Return a call that sends to the next rank and receives from the one before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, out = addend(rank, n, torch.float32), torch.empty(n)
    before = dist.get_global_rank(group, (rank - 1) % size)

    def call() -> None:
        sent = dist.isend(mine, (rank + 1) % size, group=group)
        dist.recv(out, before, group=group)
        assert sent is not None
        sent.wait()

    return _checked("send and recv", call, out, addend(before, n, torch.float32))


OPERATIONS: dict[str, Make] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send and recv": _ring,
    "barrier": lambda group, n: lambda: dist.barrier(group=group),
}


def _model(tiny: bool) -> nn.Sequential:
    torch.manual_seed(0)
    width = 32 if tiny else 1000
    return nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(width, width), nn.ReLU())))


def _training(model: nn.Module, tiny: bool) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(64, 32 if tiny else 1000, generator=generator)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def _ddp(group: dist.ProcessGroup, tiny: bool) -> tuple[Callable[[], None], Callable[[], torch.Tensor]]:
    model = nn.parallel.DistributedDataParallel(_model(tiny), process_group=group)
    return _training(model, tiny), lambda: torch.cat([p.detach().flatten() for p in model.parameters()])


def _fsdp2(group: dist.ProcessGroup, tiny: bool) -> tuple[Callable[[], None], Callable[[], torch.Tensor]]:
    model, mesh = _model(tiny), DeviceMesh.from_group(group, "cpu")
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parameters: list[Any] = list(model.parameters())  # they are DTensors
    return _training(model, tiny), lambda: torch.cat([p.full_tensor().detach().flatten() for p in parameters])


TRAININGS = {"DDP": _ddp, "FSDP2": _fsdp2}
