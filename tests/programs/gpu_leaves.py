"""Rank 1 ends before a step; rank 0 has launched its exchange on the GPU already, and is told who has left.

mpirun -n 2 python gpu_leaves.py
"""

import sys
import time

import torch

import hvdlite_torch as hvd
from tests.gpu.card import STAND_IN, take_card

hvd.init()
gpu = take_card(hvd.rank())
model = torch.nn.Linear(256, 256).to(gpu)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
x = torch.ones(8, 256, device=gpu)


def step() -> None:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


for _ in range(5):
    step()
if not STAND_IN:
    torch.cuda.synchronize()
if hvd.rank() == 1:
    sys.exit(0)
begin = time.monotonic()
try:
    for _ in range(3):
        step()
        if not STAND_IN:
            torch.cuda.synchronize()  # the host waits for the GPU, which waits for rank 1: the watchdog ends that
except hvd.HvdliteError as error:
    print(f"told after {time.monotonic() - begin:.1f} s: {type(error).__name__}: {error}", flush=True)
else:
    print("nobody told", flush=True)
