"""Trains a model on a grid of ranks, and compares with one process: ``torch_grid.py dp=2,pp=2 pp=2,tp=2``, in float64.

Sliced layers are torch's, the pipeline is ours. The data-parallel axis is `DistributedOptimizer`'s if no layer is sliced, else
FSDP's. For each grid, each rank prints the largest distance of its weights, and whether replicas are equal, bit for bit.
"""

import sys
import warnings

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hvdlite_torch as hvd

warnings.simplefilter("ignore")
STEPS, LAYERS, BATCH = 3, range(0, 16, 2), 32


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    pairs = [(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(axes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Train on a grid, print the comparison of replicas, and return this rank's part of the weights."""
    grid = hvd.ProcessGrid(**{"pp": 1, "dp": 1, **axes})
    model = make_model()
    if "tp" in axes:
        mesh = grid.to_torch()
        plan = {str(number): RowwiseParallel() if number % 4 else ColwiseParallel() for number in LAYERS}
        parallelize_module(model, mesh["tp"], plan)
        if "dp" in axes:
            for number in LAYERS:
                fully_shard(model[number], mesh=mesh["dp"])
    mine = torch.arange(BATCH).chunk(grid.axes["dp"])[grid.place["dp"]]
    cuts = [str(16 * number // grid.axes["pp"]) for number in range(1, grid.axes["pp"])]
    pipeline = hvd.Pipeline(model, grid["pp"], loss=loss_of, microbatches=4, cuts=cuts)
    optimizer = torch.optim.Adam(pipeline.parameters(), 1e-2)
    if "tp" not in axes:
        optimizer = hvd.DistributedOptimizer(optimizer, pipeline.named_parameters(), process_set=grid["dp"])
    for _ in range(STEPS):
        pipeline.step(x[mine], y[mine], optimizer)
    trained = pipeline.state_dict()
    equal = True
    for name, value in trained.items():
        sliced = isinstance(value, DTensor)
        if not sliced or all(isinstance(placement, Replicate) for placement in value.placements):
            own = value.to_local() if sliced else value
            copies = hvd.allgather(own.reshape(1, -1), name=name, process_set=grid["tp" if sliced else "dp"])
            equal = equal and all(torch.equal(copy, copies[0]) for copy in copies)
    print(f"replicas {'equal' if equal else 'DIFFERENT'}", flush=True)
    return trained


torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
hvd.init(torch_distributed=True)
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(BATCH, 12, generator=generator), torch.randn(BATCH, 12, generator=generator)
reference = make_model()
adam = torch.optim.Adam(reference.parameters(), 1e-2)
for _ in range(STEPS):
    adam.zero_grad()
    loss_of(reference(x), y).backward()
    adam.step()
expected = reference.state_dict()
for argument in sys.argv[1:]:
    found = train({name: int(size) for name, size in (axis.split("=") for axis in argument.split(","))})
    distance = max((whole(value) - expected[name]).abs().max().item() for name, value in found.items())
    print(f"distance {distance}", flush=True)
