"""Counts what ranks lose when they add to shared parameters without locks: ``hvdliterun -np 2 python -m benchmarks.hogwild``.

All ranks add 1 to each element of one parameter, and read all of it, as fast as they can, by
`AsyncDistributedOptimizer(hogwild=True)`. An addition is lost if two ranks read an element before either has written it. Then
rank 0 alone adds, and the others copy the parameter as fast as they can. A copy is torn if its elements have different numbers
of additions. In a training the ranks compute gradients between their steps, so less is lost there: this is the worst case. Rank
0 prints a line for each size.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

import hvdlite_torch as hvd

if TYPE_CHECKING:
    from hvdlite_torch.async_sgd.typed import AsyncSGD


def parameter(elements: int) -> tuple[torch.nn.Parameter, AsyncSGD]:
    """Return a parameter of zeros, and an optimizer that adds 1 to each element."""
    p = torch.nn.Parameter(torch.zeros(elements, dtype=torch.float64))
    optimizer = hvd.AsyncDistributedOptimizer(torch.optim.SGD([p], lr=1.0), hogwild=True)
    p.grad = torch.full_like(p, -1.0)
    optimizer.step()  # from now on it is the shared parameter
    hvd.barrier()
    return p, optimizer


def lost(elements: int, steps: int) -> float:
    """Return the percentage of additions that were lost. Every rank calls this."""
    p, optimizer = parameter(elements)
    hvd.barrier()
    before = float(p.detach().mean())
    hvd.barrier()
    for _ in range(steps):
        optimizer.step()
        p.detach().sum()
    optimizer.finish()
    return 100 * (1 - (float(p.detach().mean()) - before) / (steps * hvd.size()))


def torn(elements: int, steps: int) -> float:
    """Return the percentage of copies that were torn. Every rank calls this."""
    p, optimizer = parameter(elements)
    optimizer.synchronize()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    if hvd.rank() == 0:
        p.data.zero_()
    hvd.barrier()
    bad = 0
    for _ in range(steps):
        if hvd.rank() == 0:
            p.data.add_(1.0)
        else:
            copy = p.detach().clone()
            bad += bool(copy.ne(copy[0]).any())
    optimizer.finish()
    return 100 * sum(hvd.allgather_object(bad)) / (steps * (hvd.size() - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, nargs="+", default=[1, 1000, 100_000, 1_000_000])
    parser.add_argument("--additions", type=int, default=200_000_000, help="of each rank, at most 20000 steps")
    arguments = parser.parse_args()
    hvd.init()
    for elements in tqdm(arguments.elements, disable=hvd.rank() != 0, unit="size"):
        steps = min(20_000, max(100, arguments.additions // elements))
        shares = lost(elements, steps), torn(elements, steps)
        if hvd.rank() == 0:
            tqdm.write(
                f"{elements} elements, {steps} steps of each of {hvd.size()} ranks: {shares[0]:.2f} % of the additions lost, "
                f"{shares[1]:.1f} % of the copies torn"
            )


if __name__ == "__main__":
    main()
