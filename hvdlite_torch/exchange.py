"""The gradients of one optimizer, on one rank: from the parameters to the reducer's memory and back."""

from __future__ import annotations

import contextlib
import functools
import time

import torch

import hvdlite
from hvdlite.errors import HvdliteError
from hvdlite.overlap import Overlap
from hvdlite.planner import Planner
from hvdlite.protocols import Plan
from hvdlite.reducer import Postponed, Reducer
from hvdlite_torch.allocator import keep_freed_memory
from hvdlite_torch.options import Options
from hvdlite_torch.slot import Slot, wire_tensor
from hvdlite_torch.sparse_gradients import combine_sparse
from hvdlite_torch.stepping import SteppingExchange
from hvdlite_torch.tensor import ADAPTER


class GradientExchange(SteppingExchange):
    """Exchanges the gradients of an optimizer's parameters before it steps.

    A large gradient is copied into the reducer's memory as soon as a backward pass has it, while it is in the cache: what
    other ranks read of it. If they read any of it and the copy is whole, ``p.grad`` becomes a view of that memory, and what
    backward passes add later is added there. Small gradients are copied by the step, all at once.

    Args:
        optimizer: Its step hooks are made by `attach`.
        options: What the user asked for.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options) -> None:
        super().__init__(optimizer, options)
        self._reducer: Reducer | None = None
        self._overlap: Overlap | None = None
        self._planner: Planner
        if self._world.config.keep_memory:
            keep_freed_memory()
        self._prepare(self._trainable())

    def _prepare(self, parameters: list[torch.Tensor]) -> None:
        """Exchange the dense gradients of these parameters from now on."""
        infos = [ADAPTER.info(wire_tensor(parameter, self._options.codec)) for parameter in parameters]
        self._planner = self._world.planner(infos, self.process_set, self._gather, self._adapts, self._options.overlap)
        self._follow(self._planner.plan, parameters)

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
        self._small_results = [(slot.index, slot.result) for slot in self._small]
        self._make_hooks()

    def _make_hooks(self) -> None:
        assert self._reducer is not None
        for old in self._hooks:
            old.remove()
        self._hooks = []
        for slot in self._slots:
            large = self._reducer.is_large(slot.index)
            if large or self._sees_all or slot.index == 0:  # one, at least, for passes are counted
                hook = functools.partial(self._take, slot) if large else functools.partial(self._count_pass, slot.index)
                parameter = self._parameters[slot.index]
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _make_reducer(self, parameters: list[torch.Tensor], plan: Plan) -> Reducer:
        infos = [ADAPTER.info(wire_tensor(parameter, self._options.codec)) for parameter in parameters]
        return self._world.reducer(infos, self._options.op, self.process_set, plan, self._planner.settings)

    # A step

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
            said = self._said(bool(news))
            begin = time.perf_counter()
            assert self._reducer is not None
            try:
                if self._overlap is None:
                    anywhere = self._reducer.exchange(used, said)
                else:
                    anywhere = self._overlap.finish(used, said, changed)
                break
            except Postponed as stop:
                if not stop.told.news:
                    self._refuse(stop.told)
                self._set_aside(news)
        seconds = time.perf_counter() - begin
        weight = self._take_weight()
        self._deliver(anywhere)
        self._check_step(any(anywhere), self._reducer.divisor)
        if self._sparse:
            average = self._options.op is hvdlite.Average
            combine_sparse(self._sparse, weight, average, self.process_set)
        self._synchronized = True
        if self._reducer.told.odd_passes:
            self._advice.odd_passes(said.passes)
        self._passes.clear()
        if self._reducer.joined == 0:  # who has joined counts no steps, and could not follow another plan
            plan = self._planner.exchanged(seconds, 0 if self._overlap is None else self._overlap.lost)
            if plan is not None:
                self._follow(plan, dense)

    # This rank has run out of data, and others have not (`hvdlite.join`)

    def _stand_in_once(self) -> list[bool] | None:
        """As `Reducer.stand_in`; empty if the others' step has failed, or is put off."""
        assert self._reducer is not None
        try:
            return self._reducer.stand_in()
        except (HvdliteError, Postponed):  # which they raise, too, or settle among themselves
            return []

    def _find_dense(self) -> list[torch.Tensor]:
        """The parameters whose gradients go through the reducer, which is made anew if they are others than before."""
        parameters = self._dense_parameters()
        if not self._are_known(parameters):  # on every rank, or they disagree
            self._drain()
            self._prepare(parameters)
        return parameters

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

    def _take(self, slot: Slot, parameter: torch.Tensor) -> None:
        """The hook of a large parameter."""
        self._count_pass(slot.index)
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
        for parameter, (index, result) in zip(self._small_parameters, self._small_results, strict=True):
            if anywhere[index]:
                parameter.grad = result
