"""An optimizer that was made before shutdown() works after the next init(), with ranks as processes. Each rank prints "ok"."""

from typing import Any

import torch

import hvdlite_torch as hvd


def train(**options: Any) -> None:
    """Make six steps with two restarts, and compare the parameters with training in one process."""
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 1))
    truth = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 1))
    truth.load_state_dict(model.state_dict())
    alone = torch.optim.Adam(truth.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), **options)
    for step in range(6):
        if step in (2, 4):
            hvd.shutdown()
            hvd.init()
        batch = torch.randn(4 * hvd.size(), 300)
        optimizer.zero_grad()
        model(batch[hvd.rank() :: hvd.size()]).pow(2).mean().backward()
        optimizer.step()
        alone.zero_grad()
        truth(batch).pow(2).mean().backward()
        alone.step()
    hvd.join()
    for mine, right in zip(model.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
    hvd.shutdown()


train()
train(shard=True)
train(overlap=True)
print("ok")
