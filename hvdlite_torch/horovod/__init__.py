"""The names of ``import horovod.torch`` under `hvdlite.compat` that differ from `hvdlite_torch`.

Programs for Horovod rely on behaviour of Horovod that hvdlite does not have.

- `operations`: the operations with Horovod's gradients.
- `names`: the names that programs import from modules inside Horovod.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from hvdlite_torch import optimizer as own
from hvdlite_torch.step.driver import StepDriver
from hvdlite_torch.step.step_guard import hooked
from hvdlite_torch.step.wrapped import add_to_class

__all__ = ["DistributedOptimizer"]


@functools.wraps(own.DistributedOptimizer)
def DistributedOptimizer(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
    distributed = own.DistributedOptimizer(optimizer, *args, **kwargs)
    add_to_class(distributed, _Habits)
    if not isinstance(distributed, torch.optim.SparseAdam):
        for group in distributed.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
    return distributed


class _Habits:
    """Horovod's behaviour of a wrapped optimizer.

    `zero_grad` makes gradients zeros, as old versions of torch did, and not None. A step after `synchronize` warns unless it is
    within `skip_synchronize`. Learning rates that differ before the first broadcast are told, and no error.
    """

    _hvdlite_driver: StepDriver
    _horovod_synchronized = False
    _horovod_skips = False

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Call torch's `zero_grad` with the default of old versions of torch, which makes the gradients zeros."""
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def synchronize(self) -> None:
        """Exchange the gradients now."""
        self._hvdlite_driver.in_step.allow_differences()
        super().synchronize()  # type: ignore[misc]
        self._horovod_synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context manager: a step within it does not exchange gradients."""
        self._horovod_skips = True
        try:
            with super().skip_synchronize():  # type: ignore[misc]
                yield
        finally:
            self._horovod_skips = False

    @hooked
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Exchange the gradients, unless `synchronize` has done so, and step."""
        self._hvdlite_driver.in_step.allow_differences()
        if self._horovod_synchronized and not self._horovod_skips:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): Horovod "
                "would exchange the gradients once more. hvdlite does not.",
                stacklevel=2,
            )
        result = super().step(*args, **kwargs)  # type: ignore[misc]
        self._horovod_synchronized = False  # at the end, because a closure may have called synchronize
        return result
