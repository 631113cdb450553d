"""What the parts of one distributed optimizer have in common, on one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

import hvdlite
from hvdlite.api import world
from hvdlite.errors import ArgumentError
from hvdlite.gradients.header import Header, HeaderSum
from hvdlite.group import Group
from hvdlite_torch.checks.advice import Advice
from hvdlite_torch.checks.in_effect import refuse_to_step
from hvdlite_torch.checks.in_step import InStep
from hvdlite_torch.checks.same_parameters import check_agreement
from hvdlite_torch.step.lease import Lease
from hvdlite_torch.step.options import Options
from hvdlite_torch.step.pending import PendingStep


class OptimizerContext:
    """One optimizer's parameters, ranks and settings, and what this rank tells the others with its gradients.

    Args:
        optimizer: The program's.
        options: What the program asked for.
        lease: What is held beyond the optimizer.

    Attributes:
        optimizer, options, lease: As given.
        process_set: The ranks that take part.
        step: The step that comes.
        in_step: What must be the same on all ranks.
        advice: What the program is told of what goes wrong quietly.
        sparse: Parameters that have sparse gradients on some rank.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options, lease: Lease) -> None:
        self.optimizer = optimizer
        self.options = options
        self.lease = lease
        self.process_set = options.process_set
        self.step = PendingStep(options.passes)
        self.in_step = InStep(optimizer, (), self.gather, owns_state=bool(options.shard))
        self.advice: Advice
        self.sparse: list[torch.Tensor] = []
        self._world = world("DistributedOptimizer()")

    def enter(self) -> None:
        """Begin in the present world. Every rank calls this.

        Raises:
            ArgumentError: There is nothing to train.
            MismatchError: The ranks have different parameters or arguments. Raised on all of them.
        """
        self._world = world("DistributedOptimizer()")
        self.sparse = []
        options = self.options
        self.advice = Advice(self.optimizer, options.op, self.ranks, self.gather)
        self.in_step.ranks = self.ranks
        trained = self.trained()
        if not trained:
            raise ArgumentError("this optimizer has no parameters that require a gradient.")
        arguments = {
            "max_grad_norm": options.max_grad_norm,
            "op": options.op,
            "shard": bool(options.shard),
            "aggregator": None if options.aggregator is None else type(options.aggregator).__name__,
        }
        check_agreement(trained, options.names, arguments, self.ranks, self.gather)
        self.group.release_dropped()

    # The ranks

    @property
    def group(self) -> Group:
        """The ranks that take part, in the present world."""
        return self._world.group(self.process_set)

    @property
    def ranks(self) -> Sequence[int]:
        """The world ranks that take part."""
        return self._world.ranks(self.process_set)

    @property
    def config(self) -> hvdlite.config.Config:
        """The settings of the present world."""
        return self._world.config

    def gather(self, value: Any) -> list[Any]:
        """The objects of all ranks that take part. Every rank calls this."""
        return hvdlite.allgather_object(value, "optimizer.plan", process_set=self.process_set)

    def waiting_for(self, what: str) -> contextlib.AbstractContextManager[object]:
        """For a with statement, which may be entered often: this rank waits for the others; `what` is for messages."""
        return self._world.watch.guarded(lambda: what, self.group.members, remember=False)

    def check_in_effect(self) -> None:
        """Raise if the ranks that take part are no process set of the present world."""
        if self._world.over:
            refuse_to_step(self.process_set)
        self._world.engine(self.process_set)

    # The parameters

    def trained(self) -> list[torch.Tensor]:
        """The parameters that are trained."""
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def dense(self) -> list[torch.Tensor]:
        """The parameters that are trained, without those that have sparse gradients."""
        parameters = self.trained()
        if self.sparse:
            apart = set(map(id, self.sparse))
            parameters = [parameter for parameter in parameters if id(parameter) not in apart]
        return parameters

    def set_aside(self, parameters: Sequence[torch.Tensor]) -> None:
        """These have sparse gradients on some rank."""
        self.sparse = [*self.sparse, *parameters]

    # What the ranks tell each other with their gradients

    def take_weight(self) -> float:
        """The weight of this step. That of the next is to be said anew."""
        return self.step.weight.take(first_step=self.in_step.steps == 0)

    def header(self, news: bool, changed: bool | None = None) -> Header:
        """What this rank says with its gradients.

        Args:
            news: It has something to tell before gradients can be combined.
            changed: Whether the program has changed parameters in place since the last step, where that is a change for all
                ranks of the host; else None.
        """
        weight, state = self.step.weight, self.in_step.digest(changed=changed)
        return Header(weight.value, False, news, False, weight.said, state, self.step.passes)

    def refuse(self, told: HeaderSum, changed: bool | None = None) -> NoReturn:
        """The ranks have said what cannot be. Every rank calls this.

        Args:
            told: What they have said.
            changed: As for `header`.

        Raises:
            MismatchError: The text has each rank's value.
        """
        weight = self.step.weight.value if self.step.weight.said else None
        self.take_weight()
        if told.odd_weights:
            self.in_step.refuse_weights(weight)
        self.in_step.refuse(changed)

    def check_step(self, anywhere: bool, divisor: float) -> None:
        """Raise on all ranks if a step has nothing to do though there were samples.

        Args:
            anywhere: Some rank has a dense gradient.
            divisor: The sum of the weights.
        """
        if not self.sparse and not anywhere and divisor > 0:
            raise ArgumentError(
                "a step without gradients: no parameter of this optimizer has one on any rank. Call loss.backward() before "
                "optimizer.step(); for a step without samples on all ranks, optimizer.set_batch_weight(0)."
            )
