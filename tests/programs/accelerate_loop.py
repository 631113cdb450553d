"""Train in a loop of one's own with Accelerate, without `transformers`, and compare with one process."""

import os

import accelerate
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hvdlite_torch as hvd
import hvdlite_torch.accelerate

hvdlite_torch.accelerate.prepare()
hvdlite_torch.accelerate.prepare()  # once more does nothing
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x, y = torch.randn(48, 5), torch.randn(48, 2)
model, alone = torch.nn.Linear(5, 2), torch.nn.Linear(5, 2)
alone.load_state_dict(model.state_dict())

accelerator = accelerate.Accelerator()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
wrapped, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(x, y), 4))
for inputs, wanted in batches:
    optimizer.zero_grad()
    accelerator.backward(F.mse_loss(wrapped(inputs), wanted))
    optimizer.step()
accelerator.wait_for_everyone()

adam = torch.optim.Adam(alone.parameters(), lr=0.1)
for inputs, wanted in zip(x.split(4 * hvd.size()), y.split(4 * hvd.size()), strict=True):
    adam.zero_grad()
    F.mse_loss(alone(inputs), wanted).backward()
    adam.step()
away = max((a - b).abs().max().item() for a, b in zip(model.parameters(), alone.parameters(), strict=True))
numbers = (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index)
assert numbers == (hvd.size(), hvd.rank(), hvd.local_rank()), numbers
assert accelerator.gather(torch.tensor([hvd.rank()])).tolist() == list(range(hvd.size()))
assert torch.distributed.get_backend() == "hvdlite"
assert os.environ["WORLD_SIZE"] == str(hvd.size())
assert type(wrapped).__name__ == "DistributedDataParallel"
assert away < 1e-12, away
if accelerator.is_main_process:
    print(f"{accelerator.num_processes} ranks, on {accelerator.device}: weights differ by {away:.2g} at most")
