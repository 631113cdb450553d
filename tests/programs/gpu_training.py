"""Several ranks train on one GPU, and compare the weights with one process on the joined batch. Each rank prints "all right".

mpirun -n 2 python gpu_training.py
"""

import copy
import functools
import os

import torch
from torch.nn import functional as F

import hvdlite_torch as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
# NCCL refuses two ranks on one GPU unless NCCL_HOSTID differs (up to 2.29) or NCCL_MULTI_RANK_GPU_ENABLE is set (2.30).
os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo")
os.environ.update(NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
torch.cuda.set_device(0)
torch.manual_seed(3)
START = torch.nn.Sequential(
    torch.nn.Linear(64, 600), torch.nn.Tanh(), torch.nn.Linear(600, 600), torch.nn.Linear(600, 5)
)
make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)  # Adam would magnify rounding errors of tiny gradients
X, Y = torch.randn(48, 64).cuda(), torch.randint(0, 5, (48,)).cuda()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: slice) -> torch.Tensor:
    for _ in range(6):
        optimizer.zero_grad()
        if hasattr(optimizer, "set_batch_weight"):
            optimizer.set_batch_weight(len(X[rows]))
            torch.cuda._sleep(20_000_000)  # an exchange that does not wait gets old gradients
        F.cross_entropy(model(X[rows]), Y[rows]).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])


single = copy.deepcopy(START).cuda()
expected = train(single, make(single.parameters()), slice(None))
for options in ({}, {"shard": True}, {"overlap": False}):
    model = copy.deepcopy(START).cuda()
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), **options)
    first = 48 * rank * (rank + 1) // (size * (size + 1))
    weights = train(model, optimizer, slice(first, 48 * (rank + 1) * (rank + 2) // (size * (size + 1))))
    assert float((weights - expected).abs().max() / expected.abs().max()) <= 1e-5, options
    hvd.assert_in_sync(model)
print("all right", flush=True)
hvd.shutdown()
