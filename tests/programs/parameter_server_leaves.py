"""Trains with a parameter server; rank 1 stops in the middle: ``parameter_server_leaves.py HOW MODE``.

The servers are those of ``hvdliterun --servers``, or all ranks.
"""

import os
import signal
import sys
import time

import torch

import hvdlite_torch as hvd

hvd.init()
how, mode = sys.argv[1:]
p = torch.nn.Parameter(torch.zeros(2000))
optimizer = hvd.AsyncDistributedOptimizer(
    torch.optim.SGD([p, torch.nn.Parameter(torch.zeros(3))], lr=1.0),
    mode=mode,
    staleness=1 if mode == "ssp" else None,
)
if hvd.is_server():
    hvd.serve_parameters()
for step in range(0 if hvd.is_server() else 10):
    if hvd.rank() == 1 and step == 5:
        print(f"failing at {time.time()}", flush=True)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exception":
            raise ValueError("the reason of rank 1")
        if how == "end":
            sys.exit()
        while how == "loop":
            time.sleep(0.01)  # the line that rank 1 is on
    p.grad = torch.ones_like(p)
    optimizer.step()
if how != "end":
    optimizer.finish()
else:
    hvd.shutdown()
    print(f"rank ends with {-p[0].item():g}", flush=True)
