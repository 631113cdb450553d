"""Trains with a parameter server on the last rank: ``parameter_server_loses.py WHO CHECKPOINT``.

WHO is "workers": ranks 1 and 2 fail in the middle, and the others go on; or "server": the server is killed, and rank 0 saves.
"""

import hashlib
import os
import signal
import sys
import time

import torch

import hvdlite_torch as hvd

who, path = sys.argv[1:]
hvd.init()
p = torch.nn.Parameter(torch.zeros(200_000, dtype=torch.float64))
optimizer = hvd.AsyncDistributedOptimizer(
    torch.optim.SGD([p], lr=1.0, momentum=0.5),
    [("weight", p)] if who == "server" else None,
    mode="ssp",
    staleness=1,
    on_worker_loss="go on",
    checkpoint=path,
)


def kill(pid: int) -> None:
    print(f"failing at {time.time()}", flush=True)
    os.kill(pid, signal.SIGKILL)


pids = hvd.allgather_object(os.getpid())
if hvd.is_server():
    hvd.serve_parameters()
    print("served", flush=True)
    sys.exit()

for step in range(20 if who == "workers" else 1_000_000):
    if who == "workers" and (hvd.rank(), step) == (1, 5):
        kill(os.getpid())
    if who == "workers" and (hvd.rank(), step) == (2, 9):
        raise ValueError("the reason of rank 2")
    p.grad = torch.full_like(p, -1.0)
    optimizer.step()
    if hvd.rank() == 0 and who == "server":
        print("pulled", hashlib.sha256(p.detach().numpy().tobytes()).hexdigest(), flush=True)
        if step == 20:
            kill(pids[-1])
optimizer.synchronize()
state = optimizer.state_dict()
optimizer.load_state_dict(state)
optimizer.step()
optimizer.finish()
print(f"rank {hvd.rank()} ends with {p.min().item():g} to {p.max().item():g}, {len(state['state'])} state", flush=True)
try:
    hvd.allreduce(torch.ones(1), name="with all ranks")
except hvd.PeerLeftError as error:
    print(str(error).replace("\n", " "), flush=True)
