"""Learn from a table of which each rank reads its own rows. Means and deviations are those of all rows.

hvdliterun -np 2 python examples/cookbook/tabular.py
"""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn import functional as F

import hvdlite_torch as hvd

hvd.init()
table = load_breast_cancer()
mine = slice(hvd.rank(), None, hvd.size())  # a file of its own would do as well
x = torch.tensor(table.data[mine], dtype=torch.float32)
y = torch.tensor(table.target[mine], dtype=torch.float32)

sums = torch.cat([torch.tensor([float(len(x))]), x.sum(0), (x**2).sum(0)]).double()
sums = hvd.allreduce(sums, op=hvd.Sum)  # of the rows of all ranks
count, mean, squares = sums[0], *(sums[1:] / sums[0]).chunk(2)
x = ((x - mean) / (squares - mean**2).sqrt()).float()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 1))
hvd.broadcast_parameters(model)
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
held_out = torch.arange(len(x)) % 5 == 0  # of each rank's rows
with hvd.uneven():  # a rank may have more batches than another
    for _ in range(10):
        chosen = (~held_out).nonzero().flatten()
        for batch in chosen[torch.randperm(len(chosen))].split(64 // hvd.size()):
            optimizer.zero_grad()
            optimizer.set_batch_weight(len(batch))
            F.binary_cross_entropy_with_logits(model(x[batch]).squeeze(1), y[batch]).backward()
            optimizer.step()

with torch.no_grad():
    right = ((model(x[held_out]).squeeze(1) > 0) == y[held_out].bool()).sum()
counts = hvd.allreduce(torch.stack([right, held_out.sum()]), op=hvd.Sum)
if hvd.rank() == 0:
    print(f"{count:.0f} rows on {hvd.size()} ranks; {counts[0]} of {counts[1]} held-out rows are right")
