"""The gradients of one optimizer, on one rank: from the parameters to the reducer's memory and back."""

from __future__ import annotations

import contextlib
import functools
import operator
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

import hvdlite
from hvdlite import ProcessSet
from hvdlite.api import world
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.overlap import Overlap
from hvdlite.planner import Planner
from hvdlite.protocols import Plan
from hvdlite.reducer import Postponed, Reducer
from hvdlite_torch.advice import Advice
from hvdlite_torch.agreement import check_agreement
from hvdlite_torch.allocator import keep_freed_memory
from hvdlite_torch.closures import Closure, closure_of, joined_loss, replace_closure
from hvdlite_torch.fused import FusedStep
from hvdlite_torch.options import Options
from hvdlite_torch.slot import Slot, wire_tensor
from hvdlite_torch.sparse_gradients import combine_sparse
from hvdlite_torch.tensor import ADAPTER


class GradientExchange:
    """Exchanges the gradients of an optimizer's parameters before it steps.

    A large gradient is copied into the reducer's memory as soon as a backward pass has it, while it is in the cache: what
    other ranks read of it. If they read any of it and the copy is whole, ``p.grad`` becomes a view of that memory, and what
    backward passes add later is added there. Small gradients are copied by the step, all at once.

    Args:
        optimizer: Its step hooks are made by `attach`.
        options: What the user asked for.
    """

    _adapts = True
    """Other plans for the exchange may be followed."""

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options) -> None:
        self._world = world("DistributedOptimizer()")
        self.optimizer = optimizer
        self._options = options
        self.process_set = options.process_set
        self._weight = 1.0
        self._synchronized = False
        self._skip = False
        self._quiet = False
        self._passes: dict[int, int] = {}
        self._parameters: list[torch.Tensor] = []
        self._sparse: list[torch.Tensor] = []
        """Parameters that have sparse gradients on some rank."""
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._sees_all = options.passes > 1
        """Small gradients are noticed during backward passes, too."""
        self._reducer: Reducer | None = None
        self._overlap: Overlap | None = None
        self._planner: Planner
        self._fused = FusedStep(optimizer)
        self._advice = Advice(optimizer, options.op, self._gather)
        keep_freed_memory()
        if not self._trainable():
            raise ArgumentError("this optimizer has no parameters that require a gradient.")
        arguments = {"max_grad_norm": options.max_grad_norm, "op": options.op, "shard": not self._adapts}
        ranks = self._world.ranks(self.process_set)
        check_agreement(self._trainable(), options.names, arguments, ranks, self._gather)
        self._prepare(self._trainable())

    def attach(self) -> None:
        """Have the optimizer call this at each step."""
        before = self.optimizer.register_step_pre_hook(self._before_step)
        after = self.optimizer.register_step_post_hook(self._after_step)
        # Other hooks (clipping, logging) are to see the combined gradients and the new parameters, those registered before too.
        self.optimizer._optimizer_step_pre_hooks.move_to_end(before.id, last=False)  # type: ignore[attr-defined]
        self.optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]

    def _trainable(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def _prepare(self, parameters: list[torch.Tensor]) -> None:
        """Exchange the dense gradients of these parameters from now on."""
        infos = [ADAPTER.info(wire_tensor(parameter, self._options.codec)) for parameter in parameters]
        self._planner = self._world.planner(infos, self.process_set, self._gather, self._adapts, self._options.overlap)
        self._follow(self._planner.plan, parameters)

    def _gather(self, value: Any) -> list[Any]:
        return hvdlite.allgather_object(value, "optimizer.plan", process_set=self.process_set)

    def _follow(self, plan: Plan, parameters: list[torch.Tensor]) -> None:
        """Make memory and hooks for `parameters`."""
        outdated = self._reducer
        if self._overlap is not None:
            self._overlap.close()
        reducer = self._reducer = self._make_reducer(parameters, plan)
        if outdated is not None:
            self._world.release(outdated)
        self._overlap = Overlap(reducer) if plan.buckets else None
        self._parameters = parameters
        codec = self._options.codec
        self._slots = [Slot(index, parameter, reducer, codec) for index, parameter in enumerate(parameters)]
        self._large = [slot for slot in self._slots if reducer.is_large(slot.index) or slot.apart]
        # Of the others there may be thousands, and a microsecond each is much.
        self._small = [slot for slot in self._slots if not (reducer.is_large(slot.index) or slot.apart)]
        self._small_parameters = [parameters[slot.index] for slot in self._small]
        self._small_addresses = [slot.parameter_address for slot in self._small]
        self._small_memory = [slot.memory for slot in self._small]
        self._make_hooks()

    def _make_hooks(self) -> None:
        assert self._reducer is not None
        for old in self._hooks:
            old.remove()
        self._hooks = []
        for slot in self._slots:
            large = self._reducer.is_large(slot.index)
            if large or self._sees_all:
                hook = functools.partial(self._take if large else self._see, slot)
                parameter = self._parameters[slot.index]
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _make_reducer(self, parameters: list[torch.Tensor], plan: Plan) -> Reducer:
        infos = [ADAPTER.info(wire_tensor(parameter, self._options.codec)) for parameter in parameters]
        return self._world.reducer(infos, self._options.op, self.process_set, plan, self._planner.settings)

    # What the user says

    def set_weight(self, weight: float) -> None:
        """The number of samples that the gradients of the next step are the mean of."""
        if self._options.op is not hvdlite.Average:
            raise ArgumentError(f"a batch weight has no meaning for op={self._options.op!r}: it is for averages.")
        if not weight >= 0:
            raise ArgumentError(f"set_batch_weight({weight!r}): expected the number of this rank's samples, 0 or more.")
        self._weight = float(weight)

    def synchronize(self) -> None:
        """Exchange the gradients: afterwards every rank's ``p.grad`` is the combined one, or None if no rank has one."""
        self._see_all()  # a step left out after this one must not spare the next its exchange
        self._exchange()

    def set_passes(self, passes: int) -> None:
        """How many backward passes there are before a step, at most; 1 for any number."""
        if passes < 1:
            raise ArgumentError(f"backward_passes_per_step={passes}: expected 1 or more.")
        self._options = replace(self._options, passes=passes)
        self._see_all()

    def _see_all(self) -> None:
        if not self._sees_all:
            self._sees_all = True
            self._make_hooks()

    def before_unscale(self) -> None:
        """A GradScaler is about to look for infinities: in the combined gradients, so that all ranks find the same."""
        if not self._synchronized and not self._skip:
            self.synchronize()

    def after_unscale(self, infinities: Iterable[torch.Tensor]) -> None:
        """A GradScaler has counted infinities."""

    @contextlib.contextmanager
    def skip(self) -> Iterator[None]:
        """Steps within the body do not exchange."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Backward passes within the body are not the last ones before a step: their gradients are left alone."""
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    # A step

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The step hook. `args` begin with the optimizer; returns those to call `step` with instead."""
        self._fused.back()  # a step that failed may have left it
        closure = closure_of(args, kwargs)
        if closure is None:
            self._before_plain_step()
        if not self._sparse:
            self._fused.switch()
        return None if closure is None else replace_closure(args, kwargs, self._together(closure))

    def _before_plain_step(self) -> None:
        if not self._skip:
            if not self._synchronized:
                self._exchange()
            self._clip()
        self._synchronized = False

    def _clip(self) -> None:
        """Clip the combined gradients, which are the same on all ranks."""
        if self._options.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._trainable(), self._options.max_grad_norm)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._fused.back()

    def _together(self, closure: Closure) -> Closure:
        """A closure that all ranks evaluate together, to equal gradients and an equal loss."""

        weight, self._weight = self._weight, 1.0  # of the batch, however often it is evaluated

        def evaluate() -> Any:
            self._weight = weight
            loss = closure()
            self._weight = weight
            self._exchange()
            self._clip()
            return joined_loss(loss, weight, self._options.op is hvdlite.Average, self.process_set)

        return evaluate

    @torch.no_grad()
    def _exchange(self) -> None:
        self._world.engine(self.process_set)  # raises if the set has been removed
        while True:
            dense = self._find_dense()
            self._check_parameters()
            self._advice.before_exchange(dense)
            used = [True] * len(dense)
            news: list[int] = []
            changed = self._collect_large(used, news)
            self._collect_small(used, news)
            weight, self._weight = self._weight, 1.0
            begin = time.perf_counter()
            assert self._reducer is not None
            try:
                if self._overlap is None:
                    anywhere = self._reducer.exchange(used, weight, bool(news))
                else:
                    anywhere = self._overlap.finish(used, weight, changed, bool(news))
                break
            except Postponed:
                self._weight = weight
                self._set_aside(news)
        seconds = time.perf_counter() - begin
        self._deliver(anywhere)
        self._check_step(anywhere)
        if self._sparse:
            average = self._options.op is hvdlite.Average
            combine_sparse(self._sparse, weight, average, self.process_set)
        self._synchronized = True
        self._passes.clear()
        if self._reducer.joined == 0:  # who has joined counts no steps, and could not follow another plan
            plan = self._planner.exchanged(seconds, 0 if self._overlap is None else self._overlap.lost)
            if plan is not None:
                self._follow(plan, dense)

    # This rank has run out of data, and others have not (`hvdlite.join`)

    def belongs_to(self, process_set: ProcessSet | None) -> bool:
        """Whether these ranks exchange here."""
        return self._world.ranks(self.process_set) == self._world.ranks(process_set)

    def stand_in(self) -> None:
        """Take part in the exchanges of the others with nothing, until all ranks have joined."""
        while self._stand_in_once() is not None:
            pass

    def _stand_in_once(self) -> list[bool] | None:
        """As `Reducer.stand_in`; empty if the others' step has failed, or is put off."""
        assert self._reducer is not None
        try:
            return self._reducer.stand_in()
        except (HvdliteError, Postponed):  # which they raise, too, or settle among themselves
            return []

    def _find_dense(self) -> list[torch.Tensor]:
        """The parameters whose gradients go through the reducer, which is made anew if they are others than before."""
        parameters = self._trainable()
        if self._sparse:
            apart = set(map(id, self._sparse))
            parameters = [parameter for parameter in parameters if id(parameter) not in apart]
        if len(parameters) != len(self._parameters) or not all(map(operator.is_, parameters, self._parameters)):
            # A group was added, or a parameter frozen or thawed: on every rank, or they disagree.
            self._drain()
            self._prepare(parameters)
        return parameters

    def _check_step(self, anywhere: list[bool]) -> None:
        """Raise on all ranks if a step has nothing to do though there were samples."""
        assert self._reducer is not None
        if not self._sparse and not any(anywhere) and self._reducer.divisor > 0:
            raise ArgumentError(
                "a step without gradients: no parameter of this optimizer has one on any rank. Call loss.backward() before "
                "optimizer.step(); for a step without samples on all ranks, optimizer.set_batch_weight(0)."
            )

    def _set_aside(self, news: list[int]) -> None:
        """Take the parameters that have sparse gradients on any rank out of the reducer."""
        found = {index for indices in self._gather(news) for index in indices}
        self._sparse = [*self._sparse, *(self._parameters[index] for index in sorted(found))]

    def _drain(self) -> None:
        """End what the backward pass has begun to exchange, and forget it."""
        if self._overlap is not None:
            for slot in self._large:
                parameter = self._parameters[slot.index]
                if parameter.grad is slot.result:  # of an earlier step, and to be used once more
                    parameter.grad = slot.result.clone()
            self._overlap.drain()

    def _check_parameters(self) -> None:
        """Raise if a parameter is not what it was."""

    # Gradients, to the reducer

    def _see(self, slot: Slot, parameter: torch.Tensor) -> None:
        """The hook of a small parameter, where it has one: a backward pass has added to its gradient."""
        # A step that was left out after synchronize(), as GradScaler does, must not spare the next one its exchange.
        self._synchronized = False
        if self._options.passes > 1:
            passes = self._passes[slot.index] = self._passes.get(slot.index, 0) + 1
            if passes > self._options.passes:
                raise ArgumentError(
                    f"{passes} backward passes without a step, and backward_passes_per_step={self._options.passes}: raise "
                    "that number, or leave it out, which allows any."
                )

    def _take(self, slot: Slot, parameter: torch.Tensor) -> None:
        """The hook of a large parameter."""
        self._see(slot, parameter)
        gradient = parameter.grad
        slot.gradient = None
        if gradient is None or self._quiet:
            return
        if gradient is not slot.memory:
            # One that is part of a graph, or that cannot be exchanged, is left for the step.
            if (
                gradient.layout is not torch.strided
                or gradient.requires_grad
                or gradient.shape != slot.shape
                or gradient.dtype is not slot.dtype
            ):
                return
            slot.take(parameter, gradient)
        if self._planner.learning:
            self._planner.ready(slot.index)
        if self._overlap is not None:
            self._place(slot)
            self._overlap.ready(slot.index, self._weight)

    def _place(self, slot: Slot) -> None:
        """Tell the reducer where this rank's own part of a gradient is."""
        if slot.start < slot.stop:
            assert self._reducer is not None
            own = None if slot.gradient is None else ADAPTER.to_array(slot.own_part(), wide=False)
            self._reducer.place(slot.index, own)

    def _collect_large(self, used: list[bool], news: list[int]) -> bool:
        """See that this rank's large gradients are where they are reduced. Returns whether one is not what `_take` saw."""
        changed = False
        for slot in self._large:
            gradient = self._parameters[slot.index].grad
            shown, slot.gradient = slot.gradient, None
            if gradient is None:
                used[slot.index] = False
            elif gradient is shown:
                slot.gradient = shown
                if gradient._version != slot.version:  # clipped since, for example
                    slot.show(gradient)
                    changed = True
            elif gradient is not slot.memory:
                dense = self._checked(slot, gradient, news)
                used[slot.index] = dense is not None
                if dense is not None:
                    slot.load(dense)
                changed = True
            elif self._overlap is not None and gradient._version != slot.version:
                changed = True
            self._place(slot)
        return changed

    def _collect_small(self, used: list[bool], news: list[int]) -> None:
        gradients = [parameter.grad for parameter in self._small_parameters]
        # torch sees to it that a gradient is like its parameter, unless that was given other memory since.
        addresses = [parameter.data_ptr() for parameter in self._small_parameters]
        if gradients and addresses == self._small_addresses:
            with contextlib.suppress(TypeError, RuntimeError):  # some have none, or one that cannot just be copied
                torch._foreach_copy_(self._small_memory, gradients)  # type: ignore[arg-type]
                return
        for slot, gradient in zip(self._small, gradients, strict=True):
            if gradient is not None and gradient is not slot.memory:
                gradient = self._checked(slot, gradient, news)
                if gradient is not None:
                    slot.memory.copy_(gradient)
            used[slot.index] = gradient is not None

    def _checked(self, slot: Slot, gradient: torch.Tensor, news: list[int]) -> torch.Tensor | None:
        """A gradient that can be exchanged as a dense one; None if it cannot, and is among the news."""
        dense = slot.dense(gradient, self._options.sparse_as_dense)
        if dense is None:
            self._check_sparse(slot)
            news.append(slot.index)
        return dense

    def _check_sparse(self, slot: Slot) -> None:
        """Raise if sparse gradients are not supported."""

    # And back

    def _deliver(self, anywhere: list[bool]) -> None:
        for slot in self._large:
            if anywhere[slot.index]:
                combined = slot.combined()
                if combined is not slot.gradient:
                    self._parameters[slot.index].grad = combined
            slot.gradient = None
        for slot, parameter in zip(self._small, self._small_parameters, strict=True):
            if anywhere[slot.index]:
                parameter.grad = slot.result
