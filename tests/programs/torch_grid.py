"""Trains a model on a grid of ranks, and compares with one process: ``torch_grid.py dp=2,pp=2 dp=2,tp=2,shard``, in float64.

Sliced layers are torch's, the pipeline and the data-parallel axis are ours; with "fsdp" FSDP has that axis. "shard" shards the
optimizer, and "clip" clips gradients. For each grid, each rank prints the largest distance of its weights, and whether replicas
are equal, bit for bit. In the middle of the training the optimizer's state is saved and loaded; in the end a checkpoint is
saved, which a whole model loads.
"""

import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import hvdlite_torch as hvd

warnings.simplefilter("ignore")
STEPS, LAYERS, BATCH, CLIP = 4, range(0, 16, 2), 32, 0.05


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    pairs = [(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 48), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def make_optimizer(parameters: Iterable[torch.Tensor], clip: bool) -> torch.optim.Optimizer:
    """Return an optimizer to which the length of a gradient matters, if gradients are clipped."""
    return torch.optim.SGD(parameters, 0.5, momentum=0.9) if clip else torch.optim.Adam(parameters, 1e-2)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


Trained = tuple[dict[str, torch.Tensor], list[torch.Tensor]]
"""Weights by name, and the state of the optimizer."""


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for its in optimizer.state_dict()["state"].values() for value in its.values()]


def train(axes: dict[str, int], how: set[str]) -> list[Trained]:
    """Train on a grid, print the comparison of replicas, and return this rank's part of the weights, and a whole model."""
    grid = hvd.ProcessGrid(**{"pp": 1, "dp": 1, **axes})
    model = make_model()
    if "tp" in axes:
        mesh = grid.to_torch()
        plan: dict[str, ParallelStyle] = {
            str(number): RowwiseParallel() if number % 4 else ColwiseParallel() for number in LAYERS
        }
        parallelize_module(model, mesh["tp"], plan)
        if "fsdp" in how:
            for number in LAYERS:
                fully_shard(model[number], mesh=mesh["dp"])
    mine = torch.arange(BATCH).chunk(grid.axes["dp"])[grid.place["dp"]]
    cuts = [str(16 * number // grid.axes["pp"]) for number in range(1, grid.axes["pp"])]
    pipeline = hvd.Pipeline(model, grid["pp"], loss=loss_of, microbatches=4, cuts=cuts)
    optimizer = make_optimizer(pipeline.parameters(), "clip" in how)
    if "fsdp" not in how:
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            pipeline.named_parameters(),
            process_set=grid["dp"],
            shard="shard" in how,
            max_grad_norm=CLIP if "clip" in how else None,
        )
    for step in range(STEPS):
        pipeline.step(x[mine], y[mine], optimizer)
        if step == 1 and "fsdp" not in how:
            optimizer.load_state_dict(optimizer.state_dict())
            root = grid["dp"].ranks[0]
            hvd.broadcast_optimizer_state(optimizer, root, process_set=grid["dp"])
            hvd.broadcast_parameters(pipeline.state_dict(), root, process_set=grid["dp"])
            hvd.assert_in_sync(pipeline.named_parameters(), process_set=grid["dp"])
            hvd.checkpoint.save(folder, model=pipeline, optimizer=optimizer)
            hvd.checkpoint.load(folder, model=pipeline, optimizer=optimizer)
    trained = pipeline.state_dict()
    equal = True
    for name, value in trained.items():
        sliced = isinstance(value, DTensor)
        if not sliced or all(isinstance(placement, Replicate) for placement in value.placements):
            own = value.to_local() if sliced else value
            copies = hvd.allgather(own.reshape(1, -1), name=name, process_set=grid["tp" if sliced else "dp"])
            equal = equal and all(torch.equal(copy, copies[0]) for copy in copies)
    print(f"replicas {'equal' if equal else 'DIFFERENT'}", flush=True)
    if "fsdp" in how:
        return [(trained, [])]
    hvd.checkpoint.save(folder, model=pipeline, optimizer=optimizer)
    one = make_model()
    plain = make_optimizer(one.parameters(), "clip" in how)
    hvd.checkpoint.load(folder, model=one, optimizer=plain)
    return [(trained, []), (one.state_dict(), state_of(plain))]


torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
hvd.init(torch_distributed=True)
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(BATCH, 48, generator=generator), torch.randn(BATCH, 48, generator=generator)


def train_alone(clip: bool) -> Trained:
    reference = make_model()
    optimizer = make_optimizer(reference.parameters(), clip)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(reference(x), y).backward()
        if clip:
            assert nn.utils.clip_grad_norm_(reference.parameters(), CLIP) > CLIP
        optimizer.step()
    return reference.state_dict(), state_of(optimizer)


folder: Any = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, 0)

for argument in sys.argv[1:]:
    words = argument.split(",")
    how = {word for word in words if "=" not in word}
    found = train({name: int(size) for name, size in (word.split("=") for word in words if "=" in word)}, how)
    expected, state = train_alone("clip" in how)
    distances = [(whole(value) - expected[name]).abs().max() for weights, _ in found for name, value in weights.items()]
    distances += [(a - b).abs().max() for _, loaded in found if loaded for a, b in zip(loaded, state, strict=True)]
    print(f"distance {max(map(float, distances))}", flush=True)

hvd.barrier()
if hvd.rank() == 0:
    shutil.rmtree(folder)
