"""Several ranks train on one GPU, and compare the weights with one process on the joined batch. Each rank prints "all right".

mpirun -n 2 python gpu_training.py
"""

import copy
import functools
from typing import Any

import torch
from torch.nn import functional as F

import hvdlite_torch as hvd
from tests.gpu.card import late, take_card

hvd.init()
rank, size = hvd.rank(), hvd.size()
gpu = take_card(rank)
torch.manual_seed(3)
START = torch.nn.Sequential(
    torch.nn.Linear(64, 600), torch.nn.Tanh(), torch.nn.Linear(600, 600), torch.nn.Linear(600, 5)
)
make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)  # Adam would magnify rounding errors of tiny gradients
X, Y = torch.randn(48, 64).to(gpu), torch.randint(0, 5, (48,)).to(gpu)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: slice) -> torch.Tensor:
    for _ in range(6):
        optimizer.zero_grad()
        if hasattr(optimizer, "set_batch_weight"):
            optimizer.set_batch_weight(len(X[rows]))
            late(X[:1])  # an exchange that does not wait for the current stream gets old gradients
        F.cross_entropy(model(X[rows]), Y[rows]).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])


single = copy.deepcopy(START).to(gpu)
expected = train(single, make(single.parameters()), slice(None))
WAYS: tuple[dict[str, Any], ...] = ({}, {"shard": True}, {"overlap": False})
for options in WAYS:
    model = copy.deepcopy(START).to(gpu)
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), **options)
    first = 48 * rank * (rank + 1) // (size * (size + 1))
    weights = train(model, optimizer, slice(first, 48 * (rank + 1) * (rank + 2) // (size * (size + 1))))
    assert float((weights - expected).abs().max() / expected.abs().max()) <= 1e-5, options
    hvd.assert_in_sync(model)
print("all right", flush=True)
hvd.shutdown()
