"""Names of modules inside ``horovod.torch`` that public programs import, mostly for annotations and subclasses."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from hvdlite.adapter.arguments import choose_op
from hvdlite.adapter.inner_class import InnerClass, refuse
from hvdlite.compat.common.basics import HorovodBasics
from hvdlite.protocols import ReduceOp
from hvdlite_torch.step.wrapped import Distributed

_ADVICE = (
    "Wrap a torch optimizer with hvd.DistributedOptimizer(optimizer), and change what is exchanged with compression=…; or "
    "exchange gradients in your own optimizer with hvd.allreduce_async_."
)

_basics = HorovodBasics(__file__)


def handle_average_backwards_compatibility(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Return the reduction that `op` or its old spelling `average` asks for; Average if both are None.

    Raises:
        ArgumentError: Both are given.
    """
    return choose_op(op, average)


class _DistributedOptimizer(torch.optim.Optimizer, metaclass=InnerClass):
    """The class of wrapped optimizers. Only `DistributedOptimizer` makes them."""

    stands_for = Distributed
    advice = _ADVICE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raise NotYetError, because a program cannot make optimizers of this class itself."""
        raise refuse("horovod.torch.optimizer._DistributedOptimizer", _ADVICE)

    def _allreduce_grad_async(self, p: torch.nn.Parameter) -> NoReturn:
        raise refuse("_DistributedOptimizer._allreduce_grad_async", _ADVICE)
