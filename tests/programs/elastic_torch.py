"""An elastic training with torch, on the rows of a dataset, two epochs. Rank 1 is killed once, in the middle of an epoch.

argv: a folder in which the fault leaves a file; without it there is no fault. Rank 0 prints the rows of each epoch and weights.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import hvdlite_torch as hvd

ROWS, BATCH, EPOCHS = 24, 4, 2


def fail_once(folder: str) -> None:
    try:
        (Path(folder) / "killed").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str = "") -> tuple[list[list[int]], torch.Tensor]:
    """Train, and return the rows of each epoch, and the weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 5, generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(5, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 5
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-2), shard=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    sampler = hvd.elastic.ElasticSampler(range(ROWS))
    rows: Any = range(ROWS)  # all that a loader needs of a dataset
    loader: DataLoader[int] = DataLoader(rows, BATCH, sampler=sampler)
    seen: list[list[int]] = [[] for _ in range(EPOCHS)]
    state = hvd.elastic.TorchState(model, optimizer, schedule=schedule, sampler=sampler, epoch=0, steps=0, seen=seen)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.epoch < EPOCHS:
            for number, rows in enumerate(loader):
                if folder and hvd.rank() == 1 and state.steps == 4:
                    fail_once(folder)
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), rows % 3).backward()
                optimizer.step()
                sampler.record_batch(number, BATCH)
                state.steps += 1
                schedule.step()
                for each in hvd.allgather_object(rows.tolist()):
                    state.seen[state.epoch] += each
                state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    train(state)
    return state.seen, torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


if __name__ == "__main__":
    hvd.init()
    rows, weights = main(*sys.argv[1:])
    if hvd.rank() == 0:
        print(f"rows {rows}\nweights {weights.tolist()}")
