"""The gradients of one optimizer, on one rank: from the parameters to the reducer's memory and back."""

from __future__ import annotations

import functools
import time

import torch

import hvdlite
from hvdlite.gradients.overlap import Overlap
from hvdlite.gradients.planner import Planner
from hvdlite.gradients.reducer import Postponed, Reducer
from hvdlite.protocols import Plan, TensorInfo
from hvdlite_torch.step.driver import SteppingExchange
from hvdlite_torch.step.lease import weakly
from hvdlite_torch.step.options import Options
from hvdlite_torch.sync.encoded import Encodings
from hvdlite_torch.sync.large_gradients import LargeGradients
from hvdlite_torch.sync.slot import Slot
from hvdlite_torch.sync.small_gradients import SmallGradients
from hvdlite_torch.sync.sparse import combine_sparse
from hvdlite_torch.tensors.gradient import gradient_info
from hvdlite_torch.tensors.malloc import keep_freed_memory


class GradientExchange(SteppingExchange):
    """Exchanges the gradients of an optimizer's parameters before it steps.

    What is in ``p.grad`` when the optimizer steps is exchanged, whatever a program has done to it since. A large gradient that
    other ranks read is copied into the reducer's memory as soon as a backward pass has it, while it is in the cache, and
    ``p.grad`` becomes that memory: what the program sees is what is exchanged (see `Slot`). Small gradients are copied by the
    step, all at once (`SmallGradients`).

    Args:
        optimizer: Its step hooks are made by `attach`.
        options: What the user asked for.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options) -> None:
        super().__init__(optimizer, options)
        self._reducer: Reducer | None = None
        self._overlap: Overlap | None = None
        self._slots: list[Slot] = []
        self._large: LargeGradients | None = None
        self._small: SmallGradients | None = None
        self._planner: Planner
        self._begin()

    def _begin(self) -> None:
        self._world.group(self.process_set).release_dropped()
        self.missed = False
        if self._world.config.keep_memory:
            keep_freed_memory()
        codec, ranks = self._options.codec, self._world.ranks(self.process_set)
        self._encodings = (
            None if codec is None else Encodings(codec, ranks, self._gather, self._options.sparse_as_dense)
        )
        self._prepare(self._with_known_layout(self._trainable()))

    def _with_known_layout(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those of which all ranks know what is exchanged for their gradients. Of the others no rank has had a gradient."""
        return parameters if self._encodings is None else self._encodings.known(parameters)

    def _infos(self, parameters: list[torch.Tensor]) -> list[TensorInfo]:
        """What is exchanged for the gradients of these parameters."""
        return list(map(gradient_info, parameters)) if self._encodings is None else self._encodings.infos(parameters)

    def _prepare(self, parameters: list[torch.Tensor]) -> None:
        """Exchange the dense gradients of these parameters from now on."""
        infos = self._infos(parameters)
        self._planner = self._world.group(self.process_set).planner(
            infos, self._gather, self._adapts, self._options.overlap
        )
        self._follow(self._planner.plan, parameters)

    def _follow(self, plan: Plan, parameters: list[torch.Tensor]) -> None:
        """Make memory and hooks for `parameters`."""
        outdated = self._reducer
        self._leave_slots()
        if self._overlap is not None:
            self._overlap.close()
            self._overlap.join()
        reducer = self._reducer = self._make_reducer(parameters, plan)
        if outdated is not None:
            self._world.group(self.process_set).reducers.release(outdated)
        self._overlap = Overlap(reducer, weakly(self, "_choose_buffer")) if plan.buckets else None
        self.lease.reducer, self.lease.overlap = reducer, self._overlap
        self.lease.close = functools.partial(self._world.group(self.process_set).reducers.release, reducer)
        self._parameters = parameters
        encoded = [None if self._encodings is None else self._encodings.of(parameter) for parameter in parameters]
        alone = reducer.alone and self._encodings is None
        self._slots = [
            Slot(index, parameter, reducer, encoded[index], alone) for index, parameter in enumerate(parameters)
        ]
        large = [slot for slot in self._slots if reducer.is_large(slot.index) or slot.compressed]
        small = [slot for slot in self._slots if not (reducer.is_large(slot.index) or slot.compressed)]
        of_large, of_small = ([parameters[slot.index] for slot in some] for some in (large, small))
        self._large = LargeGradients(large, of_large, reducer, self._overlap, alone and self._adapts)
        self._small = SmallGradients(small, of_small, alone and self._adapts)
        self._make_hooks()

    def _leave_slots(self) -> None:
        """Let gradients have memory of their own."""
        for slot in self._slots:
            slot.leave(self._parameters[slot.index])

    def leave(self) -> None:
        super().leave()
        self._leave_slots()
        self._slots = []
        self._large = self._small = self._reducer = self._overlap = None

    def _make_hooks(self) -> None:
        assert self._reducer is not None
        self.lease.remove_hooks()
        for slot in self._slots:
            large = self._reducer.is_large(slot.index)
            if large or self._sees_all or slot.index == 0:  # one, at least, for passes are counted
                hook = weakly(self, "_take" if large else "_count_pass", slot.index)
                parameter = self._parameters[slot.index]
                self.lease.hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        if not self._slots or self._sees_all:
            self._make_hooks_of_unknown()

    def _make_hooks_of_unknown(self) -> None:
        """Count the passes of parameters that are not exchanged yet, after the others."""
        known = set(map(id, self._parameters))
        unknown = [parameter for parameter in self._dense_parameters() if id(parameter) not in known]
        for number, parameter in enumerate(unknown, len(self._slots)):
            hook = weakly(self, "_count_pass", number)
            self.lease.hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _make_reducer(self, parameters: list[torch.Tensor], plan: Plan) -> Reducer:
        return self._world.group(self.process_set).reducers.make(
            self._infos(parameters),
            self._options.op,
            plan._replace(spare=True),
            self._planner.settings,
        )

    # A step

    @torch.no_grad()
    def _exchange(self) -> None:
        self._check_in_effect()
        try:
            self._exchange_once()
        finally:
            if self._encodings is not None:
                self._encodings.forget()

    def _exchange_once(self) -> None:
        while True:
            dense = self._find_dense()
            self._check_parameters()
            everything = dense if self._encodings is None else self._dense_parameters()
            self._advice.before_exchange(everything)
            first = self._encodings is not None and self._encodings.meet(everything)
            used = [True] * len(dense)
            news: list[int] = []
            changed = self._collect(used, news)
            said = self._said(bool(news) or first)
            begin = time.perf_counter()
            assert self._reducer is not None
            try:
                if self._overlap is None:
                    anywhere = self._reducer.exchange(used, said)
                else:
                    anywhere = self._overlap.finish(used, said, changed)
                break
            except Postponed as stop:
                self.missed = self.missed or stop.told.joined > 0
                if not stop.told.news:
                    self._refuse(stop.told)
                self._set_aside(news)
                if self._encodings is not None:
                    self._sparse = [*self._sparse, *self._encodings.agree(self._dense_parameters())]
        seconds = time.perf_counter() - begin
        self.missed = self.missed or self._reducer.joined > 0
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

    def have_same_state(self) -> None:
        super().have_same_state()
        self.missed = False

    def _stand_in_once(self) -> list[bool] | None:
        assert self._reducer is not None
        return self._reducer.try_to_stand_in()

    def _find_dense(self) -> list[torch.Tensor]:
        """The parameters whose gradients go through the reducer, which is made anew if they are others than before."""
        parameters = self._with_known_layout(self._dense_parameters())
        if not self._are_known(parameters):  # on every rank, or they disagree
            self._drain()
            self._prepare(parameters)
        return parameters

    def _drain(self) -> None:
        """End what the backward pass has begun to exchange, and forget it."""
        if self._overlap is not None:
            assert self._reducer is not None
            for number in range(self._overlap.under_way, len(self._reducer.buckets)):
                self._reducer.use_buffer(number, 1)  # the program may hold what is in the other one
            self._overlap.drain()

    def _check_parameters(self) -> None:
        """Raise if a parameter is not what it was."""

    # Gradients, to the reducer

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        """The hook of a large parameter."""
        slot = self._slots[index]
        self._count_pass(index)
        if self._quiet:
            return
        if self._planner.learning:
            self._planner.ready(slot.index)
        if self._overlap is not None:
            gradient = parameter.grad
            if gradient is not None and self._overlap.may_copy(slot.index) and slot.copy(gradient):
                self._overlap.ready(slot.index, self._weight.value)
        elif not (slot.stays or slot.apart or slot.alone):
            slot.take(parameter)

    def _choose_buffer(self, number: int) -> None:
        """See `LargeGradients.choose_buffer`. Called before a bucket is exchanged early."""
        assert self._large is not None
        self._large.choose_buffer(number)

    def _collect(self, used: list[bool], news: list[int]) -> bool:
        """See that gradients are where they are reduced. Returns whether one has changed since it was copied."""
        assert self._reducer is not None
        assert self._large is not None
        assert self._small is not None
        check = functools.partial(self._checked, news)
        changed = self._large.collect(used, check)
        second = any(bucket.pool.number for bucket in self._reducer.buckets)
        self._small.use_buffers([self._reducer.buffer_of(slot.index) for slot in self._small.slots] if second else [])
        self._small.collect(used, check)
        return changed

    def _checked(self, news: list[int], slot: Slot, gradient: torch.Tensor) -> torch.Tensor | None:
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
        assert self._large is not None
        assert self._small is not None
        self._large.deliver(anywhere)
        self._small.deliver(anywhere)
