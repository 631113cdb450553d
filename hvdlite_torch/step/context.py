"""`OptimizerContext`: the state that the parts of one distributed optimizer share, on one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

import hvdlite
from hvdlite import ProcessSet
from hvdlite.api import world
from hvdlite.errors import ArgumentError
from hvdlite.gradients.aggregator import name_of
from hvdlite.gradients.header import Header, HeaderSum
from hvdlite.ranks.together import Together
from hvdlite.runtime.group import Group
from hvdlite.timeline import Counts
from hvdlite_torch.checks.advice import Advice
from hvdlite_torch.checks.in_step import InStep
from hvdlite_torch.checks.same_parameters import check_agreement
from hvdlite_torch.step.lease import Lease
from hvdlite_torch.step.options import OptimizerOptions
from hvdlite_torch.step.pending import PendingStep
from hvdlite_torch.tensors.sliced import local_of
from hvdlite_torch.tensors.split import check_apart


class OptimizerContext:
    """The parameters, ranks and settings of one optimizer, and the header that this rank sends with its gradients.

    Args:
        optimizer: The optimizer of the program.
        options: The checked arguments of the program.
        lease: The lease of the resources that can outlive the optimizer.

    Attributes:
        process_set: The ranks that take part.
        step: The record of the program's calls for the next step.
        in_step: Compares the state that must be equal on all ranks.
        advice: Warns of common mistakes that raise no error.
        sparse: The parameters that have sparse gradients on some rank.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: OptimizerOptions, lease: Lease) -> None:
        self.optimizer = optimizer
        self.options = options
        self.lease = lease
        self.process_set = options.process_set
        self.step = PendingStep(options.passes)
        self.in_step = InStep(optimizer, owns_state=bool(options.shard))
        self.advice: Advice
        self.sparse: list[torch.Tensor] = []
        self._world = world("DistributedOptimizer()")
        self._number = 0

    def enter(self) -> None:
        """Begin in the present world: compare the ranks' parameters and arguments. Every rank calls this.

        Raises:
            ArgumentError: No parameter requires a gradient, or ranks that take part hold different slices of one.
            MismatchError: The ranks have different parameters or arguments. The error is raised on all ranks.
        """
        self._world = world("DistributedOptimizer()")
        self.sparse = []
        options = self.options
        self.advice = Advice(self.optimizer, options.op, self.together)
        self.in_step.together = self.together
        check_apart(self.given(), self.ranks, hvdlite.rank())
        trained = self.trained()
        if not trained:
            raise ArgumentError("this optimizer has no parameters that require a gradient.")
        arguments = {
            "optimizer": type(self.optimizer).__name__,
            "max_grad_norm": options.max_grad_norm,
            "op": options.op,
            "shard": bool(options.shard),
            "aggregator": name_of(options.aggregator),
            "local_steps": None if options.local_steps is None else options.local_steps.name,
        }
        arguments["made in"] = self.group.maker()
        self._number = self.group.optimizers + 1
        check_agreement(trained, options.names, arguments, self.together)
        self.group.optimizers = self._number  # it counts only if all ranks make it
        self.group.release_dropped()

    # The ranks

    @property
    def group(self) -> Group:
        """The group of the ranks that take part, in the present world."""
        return self._world.group(self.process_set)

    @property
    def ranks(self) -> Sequence[int]:
        """The world ranks that take part."""
        return self._world.ranks(self.process_set)

    @property
    def together(self) -> Together:
        """The ranks that take part in the present world."""
        return Together(self.ranks, self.gather)

    @property
    def config(self) -> hvdlite.config.Config:
        """The settings of the present world."""
        return self._world.config

    def gather(self, value: Any, what: str = "optimizer.plan") -> list[Any]:
        """Return the objects of all ranks that take part, in the order of `ranks`; None for a rank that has joined.

        Every rank calls this. Reports of a wait call it `what`, so a call of the program's should be named.
        """
        return hvdlite.allgather_object(value, f"{what} {self._number}", process_set=self.process_set)

    @property
    def name(self) -> str:
        """A name for what this optimizer makes with the other ranks. Threads may step different optimizers at the same time."""
        return f"optimizer {self._number}"

    @property
    def counts(self) -> Counts | None:
        """What this rank has done; None if nobody looks at that."""
        return self._world.timeline.counts

    def waiting_for(self, what: str) -> contextlib.AbstractContextManager[object]:
        """Return a reusable context manager in which this rank waits for the other ranks. Messages call the wait `what`."""
        return self._world.watch.guarded(lambda: what, self.group.members, remember=False)

    def check_in_effect(self) -> None:
        """Raise an error unless the ranks that take part are a process set of the present world."""
        if self._world.over:
            refuse_to_step(self.process_set)
        self._world.engine(self.process_set)

    # The parameters

    def given(self) -> list[torch.Tensor]:
        """Return the parameters that require a gradient, as the program has them."""
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def trained(self) -> list[torch.Tensor]:
        """Return the parameters that require a gradient; of a parameter that is sliced over ranks, this rank's slice."""
        return list(map(local_of, self.given()))

    def dense(self) -> list[torch.Tensor]:
        """Return the parameters that require a gradient, without those in `sparse`."""
        parameters = self.trained()
        if self.sparse:
            apart = set(map(id, self.sparse))
            parameters = [parameter for parameter in parameters if id(parameter) not in apart]
        return parameters

    def set_aside(self, parameters: Sequence[torch.Tensor]) -> None:
        """Note that these parameters have sparse gradients on some rank."""
        self.sparse = [*self.sparse, *parameters]

    # The header that travels with the gradients

    def take_weight(self) -> float:
        """Return the weight of this step, and forget it: the program sets the weight of each step."""
        return self.step.weight.take(first_step=self.in_step.steps == 0)

    def header(self, news: bool, changed: bool | None = None) -> Header:
        """Return the header that this rank sends with its gradients.

        Args:
            news: Whether this rank has news for the other ranks, so that all ranks must put this exchange off.
            changed: Whether the program has changed parameters in place since the last step; None if parameters are not shared
                between ranks.
        """
        weight, state = self.step.weight, self.in_step.digest(changed=changed)
        return Header(weight.value, False, news, False, weight.is_set, state, self.step.passes)

    def refuse(self, told: HeaderSum, changed: bool | None = None) -> NoReturn:
        """Raise an error on all ranks, because their headers do not fit together. Every rank calls this.

        Args:
            told: The sum of the headers.
            changed: The same as for `header`.

        Raises:
            MismatchError: The text has each rank's value.
        """
        weight = self.step.weight.value if self.step.weight.is_set else None
        self.take_weight()
        if told.odd_weights:
            self.in_step.refuse_weights(weight)
        self.in_step.refuse(changed)

    def check_step(self, anywhere: bool, divisor: float) -> None:
        """Raise an error on all ranks if no rank has a gradient although there were samples.

        Args:
            anywhere: Whether some rank has a dense gradient.
            divisor: The sum of the weights.

        Raises:
            ArgumentError: The step has nothing to do.
        """
        if not self.sparse and not anywhere and divisor > 0:
            raise ArgumentError(
                "a step without gradients: no parameter of this optimizer has one on any rank. Call loss.backward() before "
                "optimizer.step(); for a step without samples on all ranks, optimizer.set_batch_weight(0)."
            )


def refuse_to_step(process_set: ProcessSet) -> NoReturn:
    """Raise the reason why an optimizer of `process_set` cannot step: its world has ended.

    Raises:
        NotInitializedError: There is no new world yet.
        ArgumentError: The process set is not in effect in the new world, or this rank is not in it any more; or the set was
            removed before the old world ended.
    """
    here = world("optimizer.step()")
    if process_set.process_set_id is None:
        raise ArgumentError(
            f"{process_set} is not in effect after the restart (shutdown() and init()), so its optimizer cannot step: pass "
            "this very ProcessSet object, not one of equal ranks, to init(process_sets=[…]) or add_process_set() on every rank."
        )
    here.engine(process_set)  # raises if this rank is not in it
    raise ArgumentError(
        f"this optimizer was made before shutdown(), and did not go on with init(), for its process set, {process_set}, had "
        "been removed: make the optimizer anew."
    )
