"""Learn to guess the next letter of Python's own documentation, with a recurrent network.

hvdliterun -np 2 python examples/cookbook/text.py
"""

from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

import hvdlite_torch as hvd

LENGTH, BATCH, STEPS = 48, 32, 60
hvd.init()
text = " ".join(topics.values())
letters = sorted(set(text))
numbers = torch.tensor([letters.index(letter) for letter in text[:200_000]])
pieces = numbers[: len(numbers) // LENGTH * LENGTH].reshape(-1, LENGTH)
held_out, pieces = pieces[-100:], pieces[:-100]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(letters), 48)
        self.recurrent = nn.GRU(48, 96, batch_first=True)
        self.out = nn.Linear(96, len(letters))

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        states, _ = self.recurrent(self.embedding(rows[:, :-1]))
        return F.cross_entropy(self.out(states).flatten(0, 1), rows[:, 1:].flatten())


torch.manual_seed(0)
model = Model()
hvd.broadcast_parameters(model)
optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), max_grad_norm=1.0)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
chance = torch.Generator().manual_seed(0)  # the same batches on all ranks …
for _ in range(STEPS):
    batch = torch.randint(len(pieces), (BATCH,), generator=chance)
    mine = batch[hvd.rank() :: hvd.size()]  # … and each rank takes its share
    optimizer.zero_grad()
    optimizer.set_batch_weight(len(mine))
    model.loss(pieces[mine]).backward()
    optimizer.step()
    schedule.step()

with torch.no_grad():
    loss = model.loss(held_out)  # all ranks have the same model and the same text
if hvd.rank() == 0:
    print(f"loss on held-out text: {loss:.3f} nats for each letter")
