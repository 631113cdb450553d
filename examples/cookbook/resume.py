"""Stop, and go on from the last checkpoint, on another number of ranks if you like. The result is the same.

hvdliterun -np 2 python examples/cookbook/resume.py checkpoints 4
hvdliterun -np 3 python examples/cookbook/resume.py checkpoints 8
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import hvdlite_torch as hvd

folder, epochs = sys.argv[1], int(sys.argv[2])
hvd.init()
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
hvd.broadcast_parameters(model)
# Each rank has a shard of the optimizer's state. A checkpoint has all of them, and they are cut anew when it is loaded.
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=3e-3), shard=True)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

found = hvd.checkpoint.load(folder, model=model, optimizer=optimizer, schedule=schedule)  # None if there is none
start = found["epoch"] if found else 0
for epoch in range(start, epochs):
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))  # not the state of a generator
    for batch in order.split(64):
        mine = batch[hvd.rank() :: hvd.size()]
        optimizer.zero_grad()
        optimizer.set_batch_weight(len(mine))
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
    schedule.step()
    hvd.checkpoint.save(folder, model=model, optimizer=optimizer, schedule=schedule, epoch=epoch + 1)

with torch.no_grad():
    loss = F.cross_entropy(model(images), labels)
if hvd.rank() == 0:
    print(f"epochs {start + 1} to {epochs} on {hvd.size()} ranks: loss {loss:.6f}")
