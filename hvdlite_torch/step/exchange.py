"""What each exchange of an optimizer has, whatever it combines."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from hvdlite.api import world
from hvdlite_torch.checks.in_effect import refuse_to_step
from hvdlite_torch.step.lease import Lease
from hvdlite_torch.step.options import Options
from hvdlite_torch.step.step_guard import StepGuard


class OptimizerExchange(abc.ABC):
    """What the ranks combine around the steps of one optimizer, on one rank.

    Args:
        optimizer: Its step hooks are made by `attach`.
        options: What the user asked for.

    Attributes:
        optimizer: As given.
        process_set: The ranks that take part.
        lease: What is held beyond this object.
        guard: Knows the optimizer's steps.
        missed: Some rank has missed a step since all had the same state, as far as this is known: then all ranks know the same.
    """

    missed: bool

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options) -> None:
        self._world = world("DistributedOptimizer()")
        self.optimizer = optimizer
        self._options = options
        self.process_set = options.process_set
        self.lease = Lease(self)
        self.guard = StepGuard(self._before_step, self._after_step)

    def attach(self) -> None:
        """Have the optimizer call this at each step."""
        self.guard.attach(self.optimizer)

    # What the user says

    @abc.abstractmethod
    def set_weight(self, weight: float) -> None:
        """The number of samples that the gradients of the next step are the mean of."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Exchange the gradients: afterwards every rank's ``p.grad`` is the combined one, or None if no rank has one."""

    @abc.abstractmethod
    def skip(self) -> contextlib.AbstractContextManager[None]:
        """Steps within the body do not exchange."""

    @abc.abstractmethod
    def quiet(self) -> contextlib.AbstractContextManager[None]:
        """Backward passes within the body are not the last ones before a step: their gradients are left alone."""

    def set_passes(self, passes: int) -> None:
        """How many backward passes there are before a step, at most; 1 for any number."""
        self._options = replace(self._options, passes=passes)

    @abc.abstractmethod
    def before_unscale(self) -> None:
        """A GradScaler is about to look for infinities."""

    @abc.abstractmethod
    def after_unscale(self, infinities: Iterable[torch.Tensor]) -> None:
        """A GradScaler has counted infinities."""

    # A step

    @abc.abstractmethod
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The step hook. `args` begin with the optimizer; returns those to call `step` with instead."""

    @abc.abstractmethod
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The hook after a step."""

    @abc.abstractmethod
    def have_same_state(self) -> None:
        """All ranks have been given the same parameters and state. Every rank calls this."""

    @abc.abstractmethod
    def stand_in(self) -> None:
        """Take part in the exchanges of the others with nothing, until all ranks have joined."""

    # The world ends, and there is another one

    def leave(self) -> None:
        """Hold nothing of the world any more: it has ended. This is each rank's own affair."""
        self.lease.leave()

    def rebind(self) -> None:
        """Begin anew in the present world, with what the program has set and counted. Every rank calls this."""
        self._world = world("DistributedOptimizer()")

    def _check_in_effect(self) -> None:
        """Raise if the ranks that take part are no process set of the present world."""
        if self._world.over:
            refuse_to_step(self.process_set)
        self._world.engine(self.process_set)
