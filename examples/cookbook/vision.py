"""Classify images of digits with a convolutional network. Each batch is dealt out to the ranks.

hvdliterun -np 2 python examples/cookbook/vision.py
hvdliterun -np 2 python examples/cookbook/vision.py 0.001     # another learning rate
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import hvdlite_torch as hvd

rate = float(sys.argv[1]) if len(sys.argv) > 1 else 3e-3
hvd.init()
images, labels = load_digits(return_X_y=True)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # the same on all ranks
images = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)[order]
labels = torch.tensor(labels)[order]
train, test = slice(0, 1437), slice(1437, None)

torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)),
)
hvd.broadcast_parameters(model)
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=rate))

for epoch in range(6):
    for batch in torch.randperm(1437, generator=torch.Generator().manual_seed(epoch)).split(64):
        mine = batch[hvd.rank() :: hvd.size()]  # this rank's share of the batch
        optimizer.zero_grad()
        optimizer.set_batch_weight(len(mine))  # the last batch cannot be divided evenly
        F.cross_entropy(model(images[train][mine]), labels[train][mine]).backward()
        optimizer.step()

with torch.no_grad():
    mine = slice(hvd.rank(), None, hvd.size())
    right = (model(images[test][mine]).argmax(1) == labels[test][mine]).sum()
right = hvd.allreduce(right, op=hvd.Sum)
if hvd.rank() == 0:
    print(f"{right} of {len(labels[test])} test images are right")
