"""What goes on around a step of a distributed optimizer, wherever its gradients lie.

The optimizer calls this before and after each step; the user says what there is to say about the next one. How gradients
become those of all ranks is a subclass's business: `hvdlite_torch.sync.host` for host memory, `hvdlite_torch.sync.device`
for a GPU's.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NoReturn

import torch

import hvdlite
from hvdlite.errors import ArgumentError
from hvdlite.gradients.header import Header, HeaderSum
from hvdlite_torch.checks import clipping
from hvdlite_torch.checks.advice import Advice
from hvdlite_torch.checks.in_step import InStep
from hvdlite_torch.checks.same_parameters import check_agreement
from hvdlite_torch.step.amp import finish_unscaling
from hvdlite_torch.step.batch_weight import BatchWeight
from hvdlite_torch.step.closures import Closure, closure_of, joined_loss, replace_closure
from hvdlite_torch.step.exchange import OptimizerExchange
from hvdlite_torch.step.fused import FusedStep
from hvdlite_torch.step.options import Options
from hvdlite_torch.step.own_parameters import refuse_steps
from hvdlite_torch.tensors.adapter import are_same


class SteppingExchange(OptimizerExchange):
    """The gradients of one optimizer, on one rank: exchanged before it steps.

    Args:
        optimizer: Its step hooks are made by `attach`.
        options: What the user asked for.

    Raises:
        ArgumentError: The optimizer has nothing to train.
        MismatchError: The ranks have different parameters. Raised on all of them.
    """

    _adapts = True
    """Other plans for the exchange may be followed."""

    missed = True

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options) -> None:
        super().__init__(optimizer, options)
        self._weight = BatchWeight()
        self._synchronized = False
        self._skip = False
        self._quiet = False
        self._passes: dict[int, int] = {}
        self._parameters: list[torch.Tensor] = []
        """Those whose gradients are dense on all ranks."""
        self._sparse: list[torch.Tensor] = []
        """Parameters that have sparse gradients on some rank."""
        self._sees_all = options.passes > 1
        """All gradients are noticed during backward passes."""
        self._fused = FusedStep(optimizer)
        self._in_step = InStep(optimizer, (), self._gather, owns_state=not self._adapts)
        self._enter()

    def _enter(self) -> None:
        """Begin in the present world. Every rank calls this."""
        options, ranks = self._options, self._world.ranks(self.process_set)
        self._advice = Advice(self.optimizer, options.op, ranks, self._gather)
        self._in_step.ranks = ranks
        if not self._trainable():
            raise ArgumentError("this optimizer has no parameters that require a gradient.")
        arguments = {"max_grad_norm": options.max_grad_norm, "op": options.op, "shard": not self._adapts}
        check_agreement(self._trainable(), options.names, arguments, ranks, self._gather)

    @abc.abstractmethod
    def _begin(self) -> None:
        """Make memory, channels and hooks for what is trained, in the world that was entered. Every rank calls this."""

    # The world ends, and there is another one

    def rebind(self) -> None:
        super().rebind()
        exchanged = dict(enumerate(self._parameters))
        counted = [(exchanged[index], passes) for index, passes in self._passes.items() if index in exchanged]
        self._sparse = []
        self._enter()
        self._begin()
        numbers = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._passes = {numbers[id(parameter)]: passes for parameter, passes in counted if id(parameter) in numbers}

    def attach(self) -> None:
        super().attach()
        if self._world.config.advice and len(self._world.ranks(self.process_set)) > 1:
            clipping.watch(self)

    def _trainable(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def _gather(self, value: Any) -> list[Any]:
        return hvdlite.allgather_object(value, "optimizer.plan", process_set=self.process_set)

    @abc.abstractmethod
    def _exchange(self) -> None:
        """Let every rank's ``p.grad`` be the combined one, or None if no rank has one. Every rank calls this."""

    @abc.abstractmethod
    def _make_hooks(self) -> None:
        """Have parameters call `_count_pass` after each backward pass: all of them if `_sees_all`."""

    # What the user says

    def set_weight(self, weight: float) -> None:
        self._weight.say(weight, self._options.op)
        if self._in_step.steps == 1 and not self._weight.said_first and not self._passes:
            self._advice.late_weight()

    def _take_weight(self) -> float:
        """The weight of this step. That of the next is to be said anew."""
        return self._weight.take(first_step=self._in_step.steps == 0)

    def _said(self, news: bool) -> Header:
        """What this rank says with its gradients."""
        passes = max(self._passes.values(), default=0)
        state = self._in_step.digest(changed=self._changed())
        return Header(self._weight.value, False, news, False, self._weight.said, state, passes)

    def _changed(self) -> bool | None:
        """Whether the program has changed parameters in place since the last step; None where that is each rank's affair."""
        return None

    def _refuse(self, told: HeaderSum) -> NoReturn:
        """The ranks have said what cannot be. Every rank calls this."""
        weight = self._weight.value if self._weight.said else None
        self._take_weight()
        if told.odd_weights:
            self._in_step.refuse_weights(weight)
        self._in_step.refuse(self._changed())

    def synchronize(self) -> None:
        self._see_all()  # a step left out after this one must not spare the next its exchange
        self._exchange()

    def set_passes(self, passes: int) -> None:
        super().set_passes(passes)
        self._see_all()

    def _see_all(self) -> None:
        if not self._sees_all:
            self._sees_all = True
            self._make_hooks()

    # What may go wrong quietly

    def trains_any_of(self, parameters: AbstractSet[int]) -> bool:
        """Whether some of these, given by their ``id``, are trained here."""
        return any(id(parameter) in parameters for parameter in self._trainable())

    def advise_on_clipping(self, called: str, how: str) -> bool:
        """Gradients are being clipped, by the function `called`. Returns whether that was the time for advice."""
        local = self._has_local_gradients()
        if local:
            self._advice.clipped_alone(called, how, can_synchronize=self._adapts)
        return local

    def _has_local_gradients(self) -> bool:
        """Whether ``p.grad`` is what this rank alone has computed."""
        return not (self._synchronized or self.guard.inside)

    def before_unscale(self) -> None:
        # In the combined gradients, so that all ranks find the same.
        if not self._synchronized and not self._skip:
            self.synchronize()

    def after_unscale(self, infinities: Iterable[torch.Tensor]) -> None:
        """Nothing: all ranks have counted the same."""

    @contextlib.contextmanager
    def skip(self) -> Iterator[None]:
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    # A step

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._fused.back()  # a step that failed may have left it
        refuse_steps(optimizer)
        closure = closure_of(args, kwargs)
        if closure is None:
            self._before_plain_step()
        elif not self._skip:  # else the closure exchanges by itself, or nobody does
            args, kwargs = replace_closure(args, kwargs, self._together(closure))
        if not self._sparse:
            self._fused.switch()
        return args, kwargs

    def _before_plain_step(self) -> None:
        if not self._skip:
            if not self._synchronized:
                self._exchange()
            self._unscale()
            self._clip()
        self._synchronized = False

    def _unscale(self) -> None:
        """Unscale what is to be clipped, where a GradScaler has left that to a fused step."""
        if self._options.max_grad_norm is not None:
            finish_unscaling(self.optimizer, self._combined_gradients())

    def _combined_gradients(self) -> list[torch.Tensor]:
        """Those that the step will use."""
        return [gradient for parameter in self._trainable() if (gradient := parameter.grad) is not None]

    def _clip(self) -> None:
        """Clip the combined gradients, which are the same on all ranks."""
        if self._options.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._trainable(), self._options.max_grad_norm)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._fused.back()
        self._synchronized = False
        self._in_step.steps += 1

    def have_same_state(self) -> None:
        self._in_step.steps = 0

    def _together(self, closure: Closure) -> Closure:
        """A closure that all ranks evaluate together, to equal gradients and an equal loss."""

        weighted = self._weight.said
        weight = self._take_weight()  # of the batch, however often it is evaluated

        def evaluate() -> Any:
            self._weight.put_back(weight, weighted)
            self._synchronized = False
            loss = closure()
            if not self._synchronized:  # by the closure itself
                self._weight.put_back(weight, weighted)
                self._exchange()
            self._synchronized = False
            self._clip()
            return joined_loss(loss, weight, self._options.op is hvdlite.Average, self.process_set)

        return evaluate

    # What subclasses have in common

    def _dense_parameters(self) -> list[torch.Tensor]:
        """The parameters that are trained, without those that have sparse gradients."""
        parameters = self._trainable()
        if self._sparse:
            apart = set(map(id, self._sparse))
            parameters = [parameter for parameter in parameters if id(parameter) not in apart]
        return parameters

    def _are_known(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether these are what is exchanged already. They are not if a group was added, or a parameter frozen or thawed."""
        return are_same(parameters, self._parameters)

    def _set_aside(self, news: list[int]) -> None:
        """Take the parameters that have sparse gradients on any rank out of the dense exchange. Every rank calls this."""
        found = {index for indices in self._gather(news) for index in indices or ()}
        self._sparse = [*self._sparse, *(self._parameters[index] for index in sorted(found))]

    def _check_step(self, anywhere: bool, divisor: float) -> None:
        """Raise on all ranks if a step has nothing to do though there were samples.

        Args:
            anywhere: Some rank has a dense gradient.
            divisor: The sum of the weights.
        """
        if not self._sparse and not anywhere and divisor > 0:
            raise ArgumentError(
                "a step without gradients: no parameter of this optimizer has one on any rank. Call loss.backward() before "
                "optimizer.step(); for a step without samples on all ranks, optimizer.set_batch_weight(0)."
            )

    def _count_pass(self, index: int, parameter: torch.Tensor | None = None) -> None:
        """A backward pass has added to the gradient of parameter `index`. Can be its hook."""
        # A step that was left out after synchronize(), as GradScaler does, must not spare the next one its exchange.
        self._synchronized = False
        passes = self._passes[index] = self._passes.get(index, 0) + 1
        if passes > self._options.passes > 1:
            raise ArgumentError(
                f"{passes} backward passes without a step, and backward_passes_per_step={self._options.passes}: raise "
                "that number, or leave it out, which allows any."
            )

    # This rank has run out of data, and others have not (`hvdlite.join`)

    def stand_in(self) -> None:
        while self._stand_in_once() is not None:
            self.missed = True

    @abc.abstractmethod
    def _stand_in_once(self) -> list[bool] | None:
        """Take part in one step of the others.

        Returns:
            For each of `_parameters`, whether any rank has a gradient of it; empty if the others' step has failed, or is put
            off; None if all ranks have run out of data.
        """
