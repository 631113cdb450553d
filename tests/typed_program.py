"""A program as users write it, for type checkers: scripts/check runs mypy --strict on it, and the tests run it.

pyright takes it too (by hand: ``pip install pyright && pyright tests/typed_program.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

import hvdlite
import hvdlite_torch as hvd

if TYPE_CHECKING:
    from typing_extensions import assert_type
else:

    def assert_type(value: object, kind: object) -> None:
        """Nothing, when the program runs."""


class Other(torch.optim.Optimizer):
    """A user's optimizer."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.5})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """A step."""
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= 0.5 * parameter.grad

    def own(self) -> int:
        """What torch's has not."""
        return 2


def train() -> int:
    """The README's loop, and what else an optimizer can do."""
    model = torch.nn.Linear(2, 2)
    hvd.broadcast_parameters(model.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-3), shard=True)
    for x, y in [(torch.ones(3, 2), torch.zeros(3, dtype=torch.int64))]:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]  # torch's own has no types
        optimizer.set_batch_weight(len(x))
        optimizer.step()
    adam: torch.optim.Adam = optimizer
    assert isinstance(adam, torch.optim.Adam)
    distributed: hvd.Distributed = optimizer
    assert isinstance(distributed, hvd.Distributed)

    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sgd = hvd.DistributedOptimizer(sgd, model.named_parameters(), compression=hvd.Compression.fp16)
    with sgd.no_sync():
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]  # torch's own has no types
    sgd.synchronize()
    with sgd.skip_synchronize():
        sgd.step()
    torch.optim.lr_scheduler.ConstantLR(sgd)

    other = hvd.DistributedOptimizer(Other(list(model.parameters())))
    assert_type(other, Other)
    assert isinstance(other, hvd.Distributed)
    other.set_batch_weight(2)
    return other.own()


def exchange() -> tuple[int, int]:
    """Operations, and handles of them."""
    x = torch.ones(2 * hvd.size(), 1)
    assert_type(hvd.allreduce(x), torch.Tensor)
    handle = hvd.allreduce_async(x, op=hvd.Sum)
    assert_type(handle, hvd.Handle[torch.Tensor])
    assert_type(hvd.synchronize(handle), torch.Tensor)
    assert_type(hvd.synchronize(hvd.grouped_allgather_async([x])), list[torch.Tensor])
    assert_type(hvd.alltoall(x), torch.Tensor)
    rows, counts = hvd.alltoall(x, splits=[2] * hvd.size())
    assert_type(counts, torch.Tensor)
    assert_type(hvd.broadcast_object({"epoch": 1}), dict[str, int])
    assert_type(hvdlite.allreduce_async(x, hvdlite.Sum, "x").wait(), torch.Tensor)
    own_rows, own_counts = hvdlite.alltoall(x, [2] * hvd.size())
    assert_type(own_counts, torch.Tensor)
    assert_type(hvdlite.allgather_object(1), list[int])
    assert len(own_rows) == len(rows)
    return len(rows), int(counts.sum())
