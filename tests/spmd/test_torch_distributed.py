"""torch's own parallel stack over the backend "hvdlite": each part equals training in one process, on 2, 3 and 4 processes."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from tests.support.processes import processes

pytestmark = processes
STEPS, BATCH = 3, 24
CPU = torch.device("cpu")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    hvd.init(torch_distributed=True)
    yield
    hvd.barrier()
    dist.destroy_process_group()


def make_model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.Linear(12, 24),
        nn.Tanh(),
        nn.Linear(24, 24),
        nn.Tanh(),
        nn.Linear(24, 24),
        nn.Tanh(),
        nn.Linear(24, 12),
    ]
    return nn.Sequential(*layers, nn.Identity()).to(dtype)


def batch(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, 12, generator=generator, dtype=dtype), torch.randn(
        BATCH, 12, generator=generator, dtype=dtype
    )


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-2)


def train(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


def mine(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(dtype)
    return x.chunk(hvd.size())[hvd.rank()], y.chunk(hvd.size())[hvd.rank()]


def expected(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The parameters that one process trains on the joined batch."""
    model = make_model(dtype)
    train(model, adam(model.parameters()), *batch(dtype))
    return model.state_dict()


def check(trained: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    wanted = expected(dtype)
    assert trained
    for name, tensor in trained.items():
        distance = (tensor - wanted[name]).abs().max().item()
        assert distance <= TOLERANCE[dtype], name


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.state_dict().items()}


@DTYPES
def test_ddp(dtype: torch.dtype) -> None:
    model = nn.parallel.DistributedDataParallel(make_model(dtype), bucket_cap_mb=0.003)
    train(model, adam(model.parameters()), *mine(dtype))
    check(model.module.state_dict(), dtype)


def test_hooks_of_ddp() -> None:
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, powerSGD_hook.powerSGD_hook):
        model = nn.parallel.DistributedDataParallel(make_model(torch.float32), bucket_cap_mb=0.003)
        powersgd = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=24, start_powerSGD_iter=2)
        model.register_comm_hook(powersgd if hook is powerSGD_hook.powerSGD_hook else None, hook)
        train(model, torch.optim.SGD(model.parameters(), 0.1), *mine(torch.float32))
        reference = make_model(torch.float32)
        train(reference, torch.optim.SGD(reference.parameters(), 0.1), *batch(torch.float32))
        for ours, wanted in zip(model.module.parameters(), reference.parameters(), strict=True):
            assert (ours - wanted).abs().max() < 2e-3
        assert (
            len({p.sum().item() for p in hvd.allgather(torch.cat([p.flatten() for p in model.parameters()])[None])})
            == 1
        )


@DTYPES
def test_zero_redundancy_optimizer(dtype: torch.dtype) -> None:
    model = nn.parallel.DistributedDataParallel(make_model(dtype))
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2), *mine(dtype))
    check(model.module.state_dict(), dtype)


@DTYPES
def test_fsdp2(dtype: torch.dtype) -> None:
    model, mesh = make_model(dtype), init_device_mesh("cpu", (hvd.size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, adam(model.parameters()), *mine(dtype))
    check(whole(model), dtype)


@DTYPES
def test_fsdp1(dtype: torch.dtype) -> None:
    model = FullyShardedDataParallel(make_model(dtype), device_id=CPU)
    train(model, adam(model.parameters()), *mine(dtype))
    with FullyShardedDataParallel.summon_full_params(model):
        check({name.removeprefix("_fsdp_wrapped_module."): p.clone() for name, p in model.state_dict().items()}, dtype)


@DTYPES
def test_tensor_parallel_of_a_pair_of_linear_layers(dtype: torch.dtype) -> None:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(), "6": RowwiseParallel()}
    model = parallelize_module(make_model(dtype), init_device_mesh("cpu", (hvd.size(),)), plan)
    train(model, adam(model.parameters()), *batch(dtype))
    check(whole(model), dtype)


class Attention(nn.Module):
    """Self-attention whose heads can be dealt out to ranks."""

    def __init__(self, dtype: torch.dtype, heads: int = 12) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(24, 24, dtype=dtype) for _ in range(4))
        self.width = 24 // heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [each(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for each in (self.query, self.key, self.value)]
        attended = nn.functional.scaled_dot_product_attention(*heads)
        return self.out(attended.transpose(1, 2).flatten(2))


@DTYPES
def test_tensor_parallel_of_attention(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    reference = Attention(dtype)
    model = parallelize_module(
        copy.deepcopy(reference),
        init_device_mesh("cpu", (hvd.size(),)),
        {"query": ColwiseParallel(), "key": ColwiseParallel(), "value": ColwiseParallel(), "out": RowwiseParallel()},
    )
    x, y = torch.randn(2, 2, 5, 24, dtype=dtype)
    for each in (reference, model):
        # The gradient of a bias of the keys is zero but for rounding, which Adam would scale up.
        train(each, torch.optim.SGD(each.parameters(), 0.5, momentum=0.9), x, y)
    for name, tensor in whole(model).items():
        distance = (tensor - reference.state_dict()[name]).abs().max().item()
        assert distance <= TOLERANCE[dtype], name


@DTYPES
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B])
def test_pipelines(schedule: Callable[..., Any], dtype: torch.dtype) -> None:
    rank, size = hvd.rank(), hvd.size()
    interleaved = schedule is ScheduleInterleaved1F1B
    layers, count = make_model(dtype), size * (1 + interleaved)
    cuts = [number * len(layers) // count for number in range(count + 1)]
    own = [number for number in range(count) if number % size == rank]
    modules = {number: layers[cuts[number] : cuts[number + 1]] for number in own}
    stages = [PipelineStage(modules[number], number, count, CPU) for number in own]
    run = schedule(stages if interleaved else stages[0], 8, loss_fn=loss_of)
    parameters = [p for module in modules.values() for p in module.parameters()]
    optimizer = adam(parameters) if parameters else None
    x, y = batch(dtype)
    for _ in range(STEPS):
        if optimizer:
            optimizer.zero_grad()
        run.step(*([x] if 0 in own else []), **({"target": y} if count - 1 in own else {}))
        if optimizer:
            optimizer.step()
    trained = {
        f"{cuts[number] + int(name.split('.')[0])}.{name.split('.')[1]}": tensor
        for number, module in modules.items()
        for name, tensor in zip(
            [f"{place}.{key}" for place, layer in enumerate(module) for key in layer.state_dict()],
            [each for layer in module for each in layer.state_dict().values()],
            strict=True,
        )
    }
    if trained:
        check(trained, dtype)


def test_checkpoint_of_all_ranks_is_loaded_by_fewer(tmp_path: Path) -> None:
    folder = hvd.broadcast_object(str(tmp_path), 0)
    size = hvd.size()
    saved = make_model(torch.float64)
    fully_shard(saved, mesh=init_device_mesh("cpu", (size,)))
    checkpoint.save({"model": get_model_state_dict(saved)}, checkpoint_id=folder)
    half = list(range(max(1, size // 2)))
    group = dist.new_group(half)
    if hvd.rank() in half:
        loaded = make_model(torch.float64)
        with torch.no_grad():
            for parameter in loaded.parameters():
                parameter.zero_()
        mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
        fully_shard(loaded, mesh=mesh)
        state = {"model": get_model_state_dict(loaded)}
        checkpoint.load(state, checkpoint_id=folder, process_group=group)
        set_model_state_dict(loaded, state["model"])
        for name, tensor in whole(loaded).items():
            assert torch.equal(tensor, make_model(torch.float64).state_dict()[name])
    hvd.barrier()


def test_functional_collectives_and_objects() -> None:
    import torch.distributed._functional_collectives as functional

    rank, size, world = hvd.rank(), hvd.size(), dist.group.WORLD
    x = torch.full((2 * size, 3), float(rank + 1))
    total = size * (size + 1) / 2
    assert (functional.wait_tensor(functional.all_reduce(x, "sum", world)) == total).all()
    assert functional.all_gather_tensor(x, 0, world).sum() == 6 * size * total
    assert (functional.reduce_scatter_tensor(x, "avg", 0, world) == (size + 1) / 2).all()
    assert functional.all_to_all_single(x, None, None, world)[::2, 0].tolist() == list(range(1, size + 1))
    assert (functional.broadcast(x, size - 1, world) == size).all()
    everybody: list[Any] = [None] * size
    dist.all_gather_object(everybody, {"rank": rank})
    assert everybody == [{"rank": r} for r in range(size)]
    got: list[Any] = [None]
    dist.scatter_object_list(got, [("for", r) for r in range(size)] if rank == 0 else None, 0)
    assert got == [("for", rank)]
    said = [rank]
    dist.broadcast_object_list(said, size - 1)
    assert said == [size - 1]


def test_batches_of_messages_and_coalesced_calls() -> None:
    rank, size = hvd.rank(), hvd.size()
    got = torch.empty(70_000)
    batch = [
        dist.P2POp(dist.irecv, got, (rank - 1) % size),
        dist.P2POp(dist.isend, torch.full((70_000,), float(rank)), (rank + 1) % size),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert (got == (rank - 1) % size).all()
    for length in (0, 1, 256, 900, 1000, 1008, 1016, 1020, 1024, 1025, 1040, 8192, 16_376, 16_384, 16_400, 250_000):
        works, received = [], torch.zeros(4, length)
        for number in range(4):  # the sends are awaited first
            works.append(dist.isend(torch.full((length,), float(10 * number + rank)), (rank + 1) % size, tag=number))
            works.append(dist.irecv(received[number], (rank - 1) % size, tag=number))
        for work in sorted(works, key=lambda work: work._receives):
            work.wait()
        assert (received == (10 * torch.arange(4) + (rank - 1) % size).unsqueeze(1)).all()
    ones = [torch.ones(n) for n in (3, 4)]
    with dist.distributed_c10d._coalescing_manager():
        for each in ones:
            dist.all_reduce(each)
    assert all((each == size).all() for each in ones)


def test_methods_of_a_group_take_tensors_too() -> None:
    """As those of torch's own backends: DDP calls some of them so."""
    rank, size, group = hvd.rank(), hvd.size(), dist.group.WORLD
    one, total = torch.tensor([rank + 1.0]), size * (size + 1) / 2
    for given in ((), (dist.ReduceOp.SUM,)):
        x = one.clone()
        group.allreduce(x, *given).wait()
        assert x.item() == total
    x = one.clone()
    group.allreduce([x], op=dist.ReduceOp.MAX).wait()
    assert x.item() == size
    x = one.clone()
    group.broadcast(x, size - 1).wait()
    assert x.item() == size
    x = one.clone()
    group.reduce(x, 0, dist.ReduceOp.SUM).wait()
    assert x.item() == (total if rank == 0 else rank + 1)
    outs = [torch.zeros(1) for _ in range(size)]
    group.allgather(outs, one).wait()
    assert [out.item() for out in outs] == [r + 1 for r in range(size)]
    group.scatter(x, [torch.tensor([10.0 * r]) for r in range(size)] if rank == 0 else [], 0).wait()
    assert x.item() == 10 * rank
    group.reduce_scatter(x, [one + r for r in range(size)], dist.ReduceOp.SUM).wait()
    assert x.item() == total + size * rank
    group.barrier(timeout=timedelta(seconds=60)).wait()


@pytest.mark.filterwarnings("ignore")  # join and find_unused_parameters warn of what they cost
@pytest.mark.parametrize("unused", [False, True])
def test_a_join_of_ddp(unused: bool) -> None:
    """Rank r makes 2 + r steps with gradients 2 (r + 1); torch divides by the number of all ranks."""
    rank, size = hvd.rank(), hvd.size()
    layers = nn.ModuleList([nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(2)])
    with torch.no_grad():
        for layer in layers:
            layer.weight.zero_()
    layers.forward = lambda x: layers[0](x)  # type: ignore[method-assign]
    model = DistributedDataParallel(layers if unused else layers[0], find_unused_parameters=unused)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with model.join():
        for _ in range(2 + rank):
            optimizer.zero_grad()
            (2 * (rank + 1) * model(torch.ones(1, 1, dtype=torch.float64))).sum().backward()
            optimizer.step()
    gradients = sum(2 * (r + 1) * (2 + r) for r in range(size))
    assert layers[0].weight.item() == pytest.approx(-gradients / size)
    assert layers[1].weight.item() == 0


@pytest.mark.filterwarnings("ignore:.*all_reduce_coalesced")
def test_an_expanded_result_is_refused_before_it_is_sent() -> None:
    rank, size = hvd.rank(), hvd.size()
    expanded, plain = torch.ones(1).expand(4), torch.ones(4)
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(expanded),
        lambda: dist.all_reduce_coalesced([plain, expanded]),
        lambda: dist.all_gather([expanded] * size, plain),
        lambda: dist.all_gather_into_tensor(torch.ones(1).expand(4 * size), plain),
        lambda: dist.reduce_scatter(expanded, [plain] * size),
        lambda: dist.reduce_scatter_tensor(expanded, torch.ones(4 * size)),
        lambda: dist.all_to_all([expanded] * size, [plain] * size),
        lambda: dist.all_to_all_single(torch.ones(1).expand(size), torch.ones(size)),
        lambda: dist.scatter(expanded, [plain] * size if rank == 0 else None),
        lambda: dist.recv(expanded, (rank - 1) % size),
    ]
    for call in calls:
        with pytest.raises(UnsupportedTensorError, match="an expanded tensor cannot be changed in place"):
            call()
    dist.broadcast(expanded if rank == 0 else plain, 0)  # what is only read may share memory
    out = torch.zeros(4 * size)
    dist.all_gather_into_tensor(out, expanded)
    assert (out == 1).all()
    total = torch.ones(2)
    dist.all_reduce(total)
    assert (total == size).all()


def test_a_group_is_split() -> None:
    """torch.distributed.split_group asks its own groups for this, and says so itself where there is no accelerator."""
    rank, size = hvd.rank(), hvd.size()
    ours = [r for r in range(size) if r % 2 == rank % 2]
    made = dist.group.WORLD.split_group(ours, group_name="even" if rank % 2 == 0 else "odd")
    assert (made.rank(), made.size(), made.group_name) == (ours.index(rank), len(ours), ("even", "odd")[rank % 2])
    x = torch.tensor([float(rank)])
    made.allreduce(x).wait()
    assert x.item() == sum(ours)
    again = made.split_group([0])
    assert (again is None) == (made.rank() != 0)
    for group in filter(None, (again, made)):
        group.shutdown()
    with pytest.raises(RuntimeError, match="No device associated"):
        dist.split_group(split_ranks=[[0]])


def test_groups_and_meshes() -> None:
    rank, size = hvd.rank(), hvd.size()
    pair = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        one = torch.ones(1)
        dist.all_reduce(one, group=pair)
        assert one.item() == 2
        dist.destroy_process_group(pair)
    if size % 2 == 0:
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        for name in ("dp", "tp"):
            one = torch.ones(1)
            dist.all_reduce(one, group=mesh.get_group(name))
            assert one.item() == mesh.size(("dp", "tp").index(name))
    dist.barrier()


def test_a_grid_is_a_mesh() -> None:
    size = hvd.size()
    grid = hvd.ProcessGrid(dp=-1, tp=2 if size % 2 == 0 else 1)
    mesh = grid.to_torch()
    assert mesh.mesh.tolist() == grid.ranks.tolist()
    assert list(mesh.get_coordinate() or ()) == list(grid.place.values())
    for name in grid.axes:
        one = torch.ones(1)
        dist.all_reduce(one, group=mesh.get_group(name))
        assert one.item() == grid.axes[name] == grid[name].size()


def test_init_again_and_arguments() -> None:
    hvd.barrier()
    dist.destroy_process_group()
    with pytest.raises(ArgumentError, match="MPI says that world_size is"):
        dist.init_process_group("hvdlite", rank=hvd.rank(), world_size=77)
    dist.init_process_group("hvdlite", init_method="hvdlite://", rank=hvd.rank(), world_size=hvd.size())
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (hvd.rank(), hvd.size(), "hvdlite")
    hvd.init(torch_distributed=True)  # there is one
    assert "MASTER_ADDR" not in os.environ
    dist.destroy_process_group()
    dist.init_process_group("gloo")  # without MASTER_ADDR too
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == hvd.size()
    both = dist.new_group(backend="hvdlite")
    dist.all_reduce(one, group=both)
    assert one.item() == hvd.size() ** 2
    dist.destroy_process_group()
    hvd.init(torch_distributed=True)
