"""What goes on around a step of a distributed optimizer, wherever its gradients lie.

The optimizer calls this before and after each step; the program says what there is to say about the next one. How gradients
become those of all ranks is a `GradientSync`'s business: `hvdlite_torch.sync.host` for host memory, `hvdlite_torch.sync.device`
for a GPU, `hvdlite_torch.sync.adasum` for changes of parameters. Which parameters this rank steps is that of `Sharding`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import torch

import hvdlite
from hvdlite.gradients.sync import GradientSync, StepsWith
from hvdlite_torch.checks import clipping
from hvdlite_torch.step.amp import finish_unscaling, share_infinities
from hvdlite_torch.step.closures import Closure, closure_of, joined_loss, replace_closure
from hvdlite_torch.step.context import OptimizerContext
from hvdlite_torch.step.fused import FusedStep
from hvdlite_torch.step.lease import Lease
from hvdlite_torch.step.options import Options
from hvdlite_torch.step.own_parameters import refuse_steps
from hvdlite_torch.step.sharding import Sharding, refuse_synchronize
from hvdlite_torch.step.step_guard import StepGuard

MakeSync = Callable[[OptimizerContext, Sharding | None], GradientSync]


class StepDriver:
    """The steps of one distributed optimizer, on one rank. Every rank makes one, at the same point.

    Args:
        optimizer: Its step hooks are made by `attach`.
        options: What the program asked for.
        make_sync: Makes what combines gradients. It waits for no rank: `GradientSync.begin` does.

    Attributes:
        optimizer: As given.
        lease: What is held beyond this object.
        guard: Knows the optimizer's steps.
        sync: Combines gradients.
        sharding: Knows which shard this rank steps; None if it steps all parameters.

    Raises:
        ArgumentError: The optimizer has nothing to train, or the arguments do not fit.
        MismatchError: The ranks have different parameters. Raised on all of them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options, make_sync: MakeSync) -> None:
        self.optimizer = optimizer
        self.lease = Lease(self)
        self._context = OptimizerContext(optimizer, options, self.lease)
        self._step = self._context.step
        self._steps_with = options.steps_with
        self.sharding = Sharding(self._context) if self._steps_with is StepsWith.SHARD else None
        self.sync = make_sync(self._context, self.sharding)
        self.guard = StepGuard(self._before_step, self._after_step)
        self._fused = FusedStep(optimizer)
        self._stands_in_for: list[bool] | None = None
        """What `GradientSync.stand_in` has returned for a step of this rank's shard."""
        self._begin()

    def _begin(self) -> None:
        """Begin in the present world. Every rank calls this."""
        self._context.enter()
        if self.sharding is None:
            self.sync.begin()
        else:
            self.sharding.begin(self.sync.begin)

    def attach(self) -> None:
        """Have the optimizer call this at each step."""
        self.guard.attach(self.optimizer)
        clips_own = self._steps_with is not StepsWith.OWN  # which is what the program means to clip
        if clips_own and self._context.config.advice and len(self._context.ranks) > 1:
            clipping.watch(self)

    @property
    def process_set(self) -> hvdlite.ProcessSet:
        """The ranks that take part."""
        return self._context.process_set

    # The world ends, and there is another one

    def leave(self) -> None:
        """Hold nothing of the world any more: it has ended. This is each rank's own affair."""
        self.lease.leave()
        self.sync.leave()
        self._stands_in_for = None
        if self.sharding is not None:
            self.sharding.leave()

    def rebind(self) -> None:
        """Begin anew in the present world, with what the program has set and counted. Every rank calls this."""
        self._begin()

    # What the program says

    def set_weight(self, weight: float) -> None:
        """The number of samples that the gradients of the next step are the mean of."""
        said = self._step.weight
        said.say(weight, self._context.options.op)
        if self._context.in_step.steps == 1 and not said.said_first and not self._step.passes:
            self._context.advice.late_weight()

    def set_passes(self, passes: int) -> None:
        """How many backward passes there are before a step, at most; 1 for any number."""
        self._context.options = self._context.options.with_passes(passes)
        self._step.allowed = passes
        self._count_all()

    def synchronize(self) -> None:
        """Combine the gradients: afterwards every rank's ``p.grad`` is the combined one, or None if no rank has one."""
        if self.sharding is not None:
            refuse_synchronize("synchronize()")
        self._count_all()  # a step left out after this one must not spare the next its exchange
        self._combine()

    def _count_all(self) -> None:
        if not self._step.counts_all:
            self._step.counts_all = True
            self.sync.make_hooks()

    @contextlib.contextmanager
    def skip(self) -> Iterator[None]:
        """Steps within the body do not combine gradients."""
        if self.sharding is not None:
            refuse_synchronize("skip_synchronize()")
        with self._step.leaving_out():
            yield

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        """Backward passes within the body are not the last ones before a step: their gradients are left alone."""
        return self._step.being_quiet()

    # What may go wrong quietly

    def trains_any_of(self, parameters: AbstractSet[int]) -> bool:
        """Whether some of these, given by their ``id``, are trained here."""
        return any(id(parameter) in parameters for parameter in self._context.trained())

    def advise_on_clipping(self, called: str, how: str) -> bool:
        """Gradients are being clipped, by the function `called`. Returns whether that was the time for advice."""
        local = self.sharding is not None or not (self._step.combined or self.guard.inside)
        if local:
            self._context.advice.clipped_alone(called, how, can_synchronize=self.sharding is None)
        return local

    def before_unscale(self) -> None:
        """A GradScaler is about to look for infinities: in the combined gradients, so that all ranks find the same."""
        if self._steps_with is StepsWith.ALL and not self._step.combined and not self._step.left_out:
            self.synchronize()

    def after_unscale(self, infinities: Iterable[torch.Tensor]) -> None:
        """A GradScaler has counted infinities: all ranks skip a step, or none does."""
        if self._steps_with is not StepsWith.ALL:  # else all have counted the same
            self.sync.changed_unseen("a GradScaler has unscaled them")
            share_infinities(infinities, self.process_set)

    # A step

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._back()  # a step that failed may have left it
        refuse_steps(optimizer)
        closure = closure_of(args, kwargs)
        if closure is None:
            self._before_plain_step()
        elif self._steps_with is not StepsWith.ALL:
            # Evaluated first, for it uses the whole parameters that all have, and maybe zero_grad().
            with torch.enable_grad():
                loss = (closure if self._steps_with is StepsWith.OWN else self._together(closure))()
            args, kwargs = replace_closure(args, kwargs, lambda: loss)
        elif not self._step.left_out:  # else the closure combines by itself, or nobody does
            args, kwargs = replace_closure(args, kwargs, self._together(closure))
        self.sync.before_step()
        if self.sharding is not None:
            self.sharding.shards.put_in()
        if self._steps_with is not StepsWith.OWN and not self._context.sparse:
            self._fused.switch()
        return args, kwargs

    def _before_plain_step(self) -> None:
        if self._stands_in_for is not None:
            self.sync.results.give(self._stands_in_for)
            self._stands_in_for = None
            self._clip()
        elif self._step.left_out:
            self.sync.leave_out()
        else:
            if not self._step.combined:
                self._combine()
            if self._clips:  # what a GradScaler has left to a fused step is to be clipped unscaled
                finish_unscaling(self.optimizer, self.sync.results.gradients())
            self._clip()
        self._step.combined = False

    def _combine(self) -> None:
        self._context.check_in_effect()
        self.sync.combine()
        self._step.has_combined()

    @property
    def _clips(self) -> bool:
        return self._context.options.max_grad_norm is not None

    def _clip(self) -> None:
        """Clip the combined gradients, which are the same on all ranks."""
        if (max_norm := self._context.options.max_grad_norm) is not None:
            self.sync.results.clip(max_norm)

    def _together(self, closure: Closure) -> Closure:
        """A closure that all ranks evaluate together, to equal gradients and an equal loss."""
        said = self._step.weight
        weighted = said.said
        weight = self._context.take_weight()  # of the batch, however often it is evaluated

        def evaluate() -> Any:
            said.put_back(weight, weighted)
            self._step.combined = False
            loss = closure()
            if not self._step.combined:  # by the closure itself
                said.put_back(weight, weighted)
                self._combine()
            self._step.combined = False
            self._clip()
            return joined_loss(loss, weight, self._context.options.op is hvdlite.Average, self.process_set)

        return evaluate

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._back()
        self._step.combined = False
        self._context.in_step.steps += 1
        if self.sharding is not None:
            self.sharding.after_step()
        self.sync.after_step()

    def _back(self) -> None:
        """Let the optimizer's groups be what the program has made them."""
        self._fused.back()
        if self.sharding is not None:
            self.sharding.shards.put_back()

    def have_same_state(self) -> None:
        """All ranks have been given the same parameters and state. Every rank calls this."""
        self._context.in_step.steps = 0
        self.sync.have_same_state()
        if self.sharding is not None:
            self.sharding.have_same_state()

    # This rank has run out of data, and others have not (`hvdlite.join`)

    @torch.no_grad()
    def stand_in(self) -> None:
        """Take part in the steps of the others with nothing, until all ranks have joined; step this rank's own shard."""
        while (there := self.sync.stand_in()) is not None:
            # Of a shard nobody else makes the step. The others make none if nobody had a gradient, but a weight.
            if self.sharding is not None and (any(there) or (there and self.sync.results.total_weight <= 0)):
                self._stands_in_for = there
                self.optimizer.step()
