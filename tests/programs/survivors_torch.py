"""An elastic training of two torch models, whose ranks share the rows of each step evenly. Rank 1 is killed in a backward pass.

Each rank steps all of the first model, and its shard of the second. argv: a folder in which the fault leaves a file; without it
there is no fault. Rank 0 prints the number of ranks at each step, how many processes have been rank 0, and the weights.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

import hvdlite_torch as hvd

ROWS, STEPS, AT = 12, 8, 5


def model_of(generator: torch.Generator) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 20
    return model


def main(folder: str = "") -> tuple[list[int], list[int], torch.Tensor]:
    """Train. Return the number of ranks at each step, the processes of rank 0, and the weights."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(ROWS, 300, generator=generator), torch.randn(ROWS, 1, generator=generator)
    first, second = model_of(generator), model_of(generator)
    one = hvd.DistributedOptimizer(torch.optim.Adam(first.parameters(), lr=1e-2))
    other = hvd.DistributedOptimizer(torch.optim.Adam(second.parameters(), lr=1e-2), shard=True)
    state = hvd.elastic.TorchState(first=first, one=one, second=second, other=other, step=0, sizes=[], pids=[])

    def perhaps_die(_: torch.Tensor) -> None:
        mark = Path(folder) / "killed"
        if folder and hvd.rank() == 1 and state.step == AT and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    next(second.parameters()).register_hook(perhaps_die)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.step < STEPS:
            mine = slice(hvd.rank(), None, hvd.size())
            for model, optimizer in ((first, one), (second, other)):
                optimizer.zero_grad()
                (model(x[mine]) - y[mine]).square().mean().backward()
                optimizer.step()
            state.sizes.append(hvd.size())
            state.pids += [os.getpid()] if os.getpid() not in state.pids and hvd.rank() == 0 else []
            state.step += 1
            state.commit()

    train(state)
    parameters = [*first.parameters(), *second.parameters()]
    return state.sizes, state.pids, torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


if __name__ == "__main__":
    hvd.init()
    sizes, pids, weights = main(*sys.argv[1:])
    if hvd.rank() == 0:
        print(f"sizes {sizes}\nprocesses {len(pids)}\nweights {weights[::500].tolist()}")
