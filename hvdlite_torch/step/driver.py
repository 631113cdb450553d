"""`StepDriver` works before and after each step of a distributed optimizer, with gradients in host memory or on a GPU.

The optimizer calls the driver before and after each step, and the program tells it about the next step. A `GradientSync`
combines the gradients of all ranks: `hvdlite_torch.sync.host` in host memory, `hvdlite_torch.sync.device` on a GPU, or
`hvdlite_torch.sync.adasum`, which combines changes of parameters. `Sharding` knows which parameters this rank steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

import hvdlite
from hvdlite import ProcessSet
from hvdlite.api import world
from hvdlite_torch.checks import clipping
from hvdlite_torch.step.amp import finish_unscaling, share_infinities
from hvdlite_torch.step.context import OptimizerContext
from hvdlite_torch.step.fused import FusedStep
from hvdlite_torch.step.gradient_sync import GradientSync
from hvdlite_torch.step.lease import Lease
from hvdlite_torch.step.options import OptimizerOptions, StepsWith
from hvdlite_torch.step.own_parameters import refuse_steps
from hvdlite_torch.step.sharding import Sharding, refuse_synchronize
from hvdlite_torch.step.step_guard import StepGuard
from hvdlite_torch.tensors.sliced import slices_have_gradients

MakeSync = Callable[[OptimizerContext, Sharding | None], GradientSync]


class StepDriver:
    """Works before and after the steps of one distributed optimizer, on one rank. Every rank makes one, at the same point.

    Args:
        optimizer: The optimizer of the program. `attach` makes its step hooks.
        options: The arguments of the program.
        make_sync: Makes the object that combines gradients, without waiting for another rank.

    Attributes:
        lease: The lease of the resources that can outlive this object.
        guard: Finds the outermost of nested steps.
        sync: Combines gradients.
        in_step: Compares the state that must be equal on all ranks.
        sharding: The shard that this rank steps, or None.

    Raises:
        ArgumentError, MismatchError: See `OptimizerContext.enter` and `GradientSync.begin`; or the arguments do not fit.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: OptimizerOptions, make_sync: MakeSync) -> None:
        self.optimizer = optimizer
        self.lease = Lease(self)
        self._context = OptimizerContext(optimizer, options, self.lease)
        self._step, self.in_step = self._context.step, self._context.in_step
        self._steps_with = options.steps_with
        self.sharding = Sharding(self._context) if self._steps_with is StepsWith.SHARD else None
        self.sync = make_sync(self._context, self.sharding)
        self.guard = StepGuard(self._before_step, self._after_step)
        self._fused = FusedStep(optimizer)
        self._stands_in_for: list[bool] | None = None
        """The result of `GradientSync.stand_in`, for the next step, which this rank makes without data of its own."""
        self._begin()

    def _begin(self) -> None:
        """Check the ranks' arguments, and make memory and hooks in the present world. Every rank calls this."""
        with world("DistributedOptimizer()").group(self.process_set).making:
            self._context.enter()
            self.sync.begin() if self.sharding is None else self.sharding.begin(self.sync.begin)

    def attach(self) -> None:
        """Register the step hooks, and watch for gradients that are clipped too early."""
        self.guard.attach(self.optimizer)
        # A program whose optimizer steps with its own gradients clips these on purpose.
        says_so = self._context.config.advice or self.sharding is not None
        if self._steps_with is not StepsWith.OWN and says_so and len(self._context.ranks) > 1:
            clipping.watch(self)

    @property
    def process_set(self) -> hvdlite.ProcessSet:
        """The ranks that take part."""
        return self._context.process_set

    # The end of a world, and the next world

    def leave(self) -> None:
        """Drop everything that belongs to the world that has ended. Each rank does this by itself."""
        self.lease.leave()
        self.sync.leave()
        self._stands_in_for = None
        if self.sharding is not None:
            self.sharding.leave()

    def rebind(self) -> None:
        """Continue in the present world, with the program's settings and the counts so far. Every rank calls this."""
        self._begin()

    # Calls of the program

    def set_weight(self, weight: float, unless_set: bool = False) -> None:
        """Set the number of samples in this rank's batch of the next step: see `BatchWeight.set`."""
        batch = self._step.weight
        if unless_set and (batch.is_set or self._context.options.op is not hvdlite.Average):
            return
        batch.set(weight, self._context.options.op)
        if self.in_step.steps == 1 and not batch.first_was_set and not self._step.passes:
            self._context.advice.late_weight()

    def set_passes(self, passes: int) -> None:
        """Set the largest number of backward passes before a step; 1 for any number. Raise ArgumentError below 1."""
        self._context.options = self._context.options.with_passes(passes)
        self._step.allowed = passes
        self._count_all()

    def synchronize(self) -> None:
        """Combine the gradients. Then ``p.grad`` is the combined gradient on every rank, or None if no rank has a gradient."""
        if self.sharding is not None:
            refuse_synchronize("synchronize()")
        self._count_all()  # if a step is left out after this, the next one must combine
        self._combine()

    def _count_all(self) -> None:
        if not self._step.counts_all:
            self._step.counts_all = True
            self.sync.make_hooks()

    @contextlib.contextmanager
    def skip(self) -> Iterator[None]:
        """Return a context manager: steps in its body do not combine gradients."""
        if self.sharding is not None:
            refuse_synchronize("skip_synchronize()")
        with self._step.leaving_out():
            yield

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager: in its body backward passes are not the last ones before a step.

        Hooks do not copy the gradients of such passes.
        """
        return self._step.being_quiet()

    # Mistakes that raise no error

    def has(self) -> AbstractSet[int]:
        """Return the ``id`` of each parameter of the optimizer."""
        return {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}

    def advise_on_clipping(self, called: str, how: str) -> bool:
        """Warn if the program clips gradients that are not combined yet, and return whether it does.

        Args:
            called: The function that clips.
            how: What it clips by then, for the text.

        Raises:
            ArgumentError: The optimizer is sharded, so no moment is right: a rank never has all combined gradients.
        """
        if self.sharding is not None:
            refuse_synchronize(f"{called}()")
        local = not (self._step.combined or self.guard.inside)
        if local:
            self._context.advice.clipped_alone(called, how)
        return local

    def advise_on_others(self, called: str, others: Sequence[torch.Tensor]) -> None:
        """Warn that the norm by which the program clips has gradients in it that no optimizer combines."""
        self._context.advice.clipped_with_others(called, others)

    def before_unscale(self) -> None:
        """Combine the gradients before a GradScaler looks for infinities, so that all ranks find the same ones."""
        if self._steps_with is StepsWith.ALL and not self._step.combined and not self._step.left_out:
            self.synchronize()

    def after_unscale(self, infinities: Iterable[torch.Tensor]) -> None:
        """Share what a GradScaler has found: all ranks skip a step, or none does."""
        if self._steps_with is not StepsWith.ALL:  # with ALL, every rank has counted the same infinities
            self.sync.changed_unseen("a GradScaler has unscaled them")
            share_infinities(infinities, self.process_set)

    # A step

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._back()  # a failed step may have left its changes
        refuse_steps(optimizer)
        closure = closure_of(args, kwargs)
        if closure is None:
            self._before_plain_step()
        elif self._steps_with is not StepsWith.ALL:
            # The closure uses the whole parameters that all ranks have, and maybe zero_grad(): it is evaluated before the step.
            with torch.enable_grad():
                loss = (closure if self._steps_with is StepsWith.OWN else self._together(closure))()
            args, kwargs = replace_closure(args, kwargs, lambda: loss)
        elif not self._step.left_out:  # if it is left out, the closure combines by itself, or nobody does
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
            self._clip(unscale=True)
        self._step.combined = False

    def _combine(self) -> None:
        self._context.check_in_effect()
        with slices_have_gradients(self._context.given()):
            self.sync.combine()
        self._step.has_combined()

    def _clip(self, unscale: bool = False) -> None:
        """Clip the gradients that the optimizer steps with, if ``max_grad_norm`` is set.

        Args:
            unscale: Whether to unscale the gradients before, if a GradScaler has left that to a fused step.
        """
        max_norm = self._context.options.max_grad_norm
        if max_norm is None:
            return
        if unscale:
            finish_unscaling(self.optimizer, self.sync.results.gradients())
        self.sync.results.clip(max_norm)

    def _together(self, closure: Closure) -> Closure:
        """Return a closure that all ranks evaluate together. Each evaluation gives equal gradients and an equal loss."""
        batch = self._step.weight
        weighted = batch.is_set
        weight = self._context.take_weight()  # the batch has one weight, however often the closure is evaluated

        def evaluate() -> Any:
            batch.put_back(weight, weighted)
            self._step.combined = False
            loss = closure()
            if not self._step.combined:  # the closure itself has not combined them
                batch.put_back(weight, weighted)
                self._combine()
            self._step.combined = False
            self._clip()
            return joint_loss(loss, weight, self._context.options.op is hvdlite.Average, self.process_set)

        return evaluate

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._back()
        self._step.combined = False
        self.in_step.steps += 1
        if self.sharding is not None:
            self.sharding.after_step()
        self.sync.after_step()

    def _back(self) -> None:
        """Undo what the last step did to the optimizer's groups: fused steps, and pieces in place of whole parameters."""
        self._fused.back()
        if self.sharding is not None:
            self.sharding.shards.put_back()

    def have_same_state(self) -> None:
        """Note that all ranks have been given the same parameters and state. Every rank calls this."""
        self.in_step.have_same_state()
        self.sync.have_same_state()
        if self.sharding is not None:
            self.sharding.have_same_state()

    # This rank has run out of data, and other ranks have not (`hvdlite.join`)

    @torch.no_grad()
    def stand_in(self) -> None:
        """Take part in the steps of the other ranks without data, until all ranks have joined. Step this rank's own shard."""
        while (there := self.sync.stand_in()) is not None:
            # No other rank steps this shard. If ranks had samples and nobody had a gradient, the others raise and do not step.
            if self.sharding is not None and (any(there) or (there and self.sync.results.total_weight <= 0)):
                self._stands_in_for = there
                self.optimizer.step()


Closure = Callable[[], Any]


def closure_of(args: Any, kwargs: Any) -> Closure | None:
    """Return the closure among the arguments of a step, or None. With a method, ``args[0]`` is the optimizer."""
    found: Closure | None = args[1] if len(args) > 1 else kwargs.get("closure")
    return found


def replace_closure(args: Any, kwargs: Any, closure: Closure) -> tuple[Any, Any]:
    """Return the arguments of a step with another closure. ``args[0]`` is the optimizer."""
    return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})


def joint_loss(loss: Any, weight: float, average: bool, process_set: ProcessSet | None) -> Any:
    """Return the loss of the joint batch of all ranks. Every rank calls this.

    Args:
        loss: The loss of this rank: a tensor with one element, or a number.
        weight: The number of samples of this rank.
        average: Whether the sum is divided by the sum of the weights.
        process_set: The ranks that take part.

    Returns:
        A tensor or a float, of the type of `loss`; the same value on all ranks.
    """
    value = torch.as_tensor(loss, dtype=torch.float64).detach()
    weighted, total = hvdlite.allreduce(
        [value * weight, torch.full_like(value, weight)], hvdlite.Sum, process_set=process_set
    )
    joint = weighted / total if average else weighted
    return joint.to(loss) if isinstance(loss, torch.Tensor) else float(joint)
