"""`HostSync` combines the gradients of one optimizer in host memory, before the optimizer steps.

The step combines what is in ``p.grad`` at that moment, whatever the program has done to it since the backward pass. A large
gradient that other ranks read is copied to the reducer's memory by a hook, while it is in the cache. Then ``p.grad`` becomes
that memory, so the program sees and changes what will be combined (see `Slot`). The step copies small gradients, all at once.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import torch

import hvdlite
from hvdlite.gradients.planner import Planner
from hvdlite.gradients.reducer import Postponed
from hvdlite.protocols import Plan, TensorInfo
from hvdlite_torch.step.context import OptimizerContext
from hvdlite_torch.step.gradient_sync import GradientSync
from hvdlite_torch.step.lease import weakly
from hvdlite_torch.step.sharding import Sharding
from hvdlite_torch.sync.encoded import Encodings
from hvdlite_torch.sync.host_gradients import HostGradients
from hvdlite_torch.sync.host_sharded import HostShards
from hvdlite_torch.sync.sparse import combine_sparse
from hvdlite_torch.sync.whole import WholeResults
from hvdlite_torch.tensors.adapter import are_same
from hvdlite_torch.tensors.gradient import gradient_info
from hvdlite_torch.tensors.malloc import keep_freed_memory
from hvdlite_torch.tensors.sliced import local_of


class HostSync(GradientSync):
    """The `GradientSync` for gradients in host memory.

    Args:
        context: The optimizer.
        sharding: The shard that this rank steps; None if this rank steps all parameters.

    Raises:
        ArgumentError: ``overlap=True`` and ``shard=True`` do not go together.
    """

    missed = False

    def __init__(self, context: OptimizerContext, sharding: Sharding | None) -> None:
        super().__init__(context)
        self._shards = None if sharding is None else HostShards(context, sharding)
        self.results = self._shards or WholeResults(context)
        self._parameters: list[torch.Tensor] = []
        """The parameters whose gradients are dense on all ranks, and whose encoded layout is known."""
        self._gradients: HostGradients | None = None
        self._planner: Planner

    @property
    def _here(self) -> HostGradients:
        assert self._gradients is not None
        return self._gradients

    # Memory and hooks

    def begin(self) -> None:
        context = self._context
        self.missed = False
        keep_freed_memory(context.config)
        options = context.options
        codec = options.codec
        self._encodings = None if codec is None else Encodings(codec, context.together, options.sparse_as_dense)
        self._prepare(self._with_known_layout(context.trained()))

    def _with_known_layout(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters whose encoded layout all ranks know. No rank has had a gradient of the others."""
        return parameters if self._encodings is None else self._encodings.known(parameters)

    def _prepare(self, parameters: list[torch.Tensor]) -> None:
        """Begin to combine the dense gradients of `parameters`, with a new planner. Every rank calls this."""
        context = self._context
        adapts = self._shards is None and context.options.aggregator is None
        infos = self._infos(parameters)
        self._planner = context.group.planner(infos, context.gather, adapts, context.options.overlap)
        self._follow(self._planner.plan, parameters)

    def _infos(self, parameters: list[torch.Tensor]) -> list[TensorInfo]:
        """Return dtype and shape of what travels for the gradient of each parameter."""
        return list(map(gradient_info, parameters)) if self._encodings is None else self._encodings.infos(parameters)

    def _follow(self, plan: Plan, parameters: list[torch.Tensor]) -> None:
        """Make buckets and hooks for `parameters`, and release the present buckets. Every rank calls this."""
        context, outdated = self._context, self._gradients
        options, reducers = context.options, context.group.reducers
        if outdated is not None:
            outdated.close()
        infos, spare = self._infos(parameters), plan._replace(spare=True)
        if self._shards is None:
            settings = self._planner.settings
            reducer = reducers.make(infos, options.op, spare, settings, options.aggregator, context.name)
        else:
            reducer = self._shards.make_reducer(parameters, infos, spare)
        if outdated is not None:
            reducers.release(outdated.reducer)
        here = self._gradients = HostGradients(
            parameters,
            reducer,
            bool(plan.buckets),
            self._encodings,
            sharded=self._shards is not None,
            sparse_as_dense=options.sparse_as_dense,
        )
        self._parameters = parameters
        if self._shards is not None:
            self._shards.follow(here)
        context.lease.reducer, context.lease.overlap = reducer, here.overlap
        context.lease.close = functools.partial(reducers.release, reducer)
        self.make_hooks()

    def make_hooks(self) -> None:
        hooks, counts_all = self._context.lease, self._context.step.counts_all
        hooks.remove_hooks()
        of_program = {id(local_of(parameter)): parameter for parameter in self._context.given()}
        for index, parameter in enumerate(self._parameters):
            if self._here.slots[index].large:
                hooks.add_hook(of_program[id(parameter)], weakly(self, "ready", index))
            elif counts_all or index == 0:  # passes are counted by one parameter at least
                hooks.add_hook(of_program[id(parameter)], weakly(self._context.step, "count_pass"))
        if counts_all or not self._parameters:  # also count passes of parameters that are not combined yet
            known = set(map(id, self._parameters))
            for parameter in self._context.dense():
                if id(parameter) not in known:
                    hooks.add_hook(of_program[id(parameter)], weakly(self._context.step, "count_pass"))

    def ready(self, index: int, parameter: torch.Tensor) -> None:
        """Count a backward pass, and let the gradient be copied. This is the hook of a large parameter."""
        step = self._context.step
        step.count_pass(parameter)
        if step.quiet:
            return
        if self._planner.learning:
            self._planner.ready(index)
        # A slice has no gradient now, so it is not copied before the step.
        self._here.take(index, self._parameters[index], step.weight.value)

    def leave(self) -> None:
        if self._gradients is not None:
            self._gradients.leave()
        self._gradients = None
        if self._shards is not None:
            self._shards.leave()

    # A step

    @torch.no_grad()
    def combine(self) -> None:
        try:
            self._combine()
        finally:
            if self._encodings is not None:
                self._encodings.forget()

    def _combine(self) -> None:
        context = self._context
        while True:
            here = self._with_present_parameters()
            everything = self._parameters if self._encodings is None else context.dense()
            context.advice.before_exchange(everything)
            first = self._encodings is not None and self._encodings.meet(everything)
            used, changed = here.collect()
            program_changed = None if self._shards is None else self._shards.changed()
            said = context.header(bool(here.news) or first, program_changed)
            begin = time.perf_counter()
            try:
                if here.overlap is None:
                    anywhere = here.reducer.exchange(used, said)
                else:
                    anywhere = here.overlap.finish(used, said, changed)
                break
            except Postponed as stop:
                self.missed = self.missed or stop.told.joined > 0
                if not stop.told.news:
                    context.refuse(stop.told, program_changed)
                self._hear_news(here.news)
        seconds = time.perf_counter() - begin
        joined = here.reducer.joined
        self.missed = self.missed or joined > 0
        weight = context.take_weight()
        if self._shards is None:
            for part in here.parts:
                part.deliver(anywhere)
        else:
            self._shards.give(anywhere)
        context.check_step(any(anywhere), here.reducer.divisor)
        if context.sparse:
            combine_sparse(context.sparse, weight, context.options.op is hvdlite.Average, context.process_set)
        if here.reducer.told.odd_passes:
            context.advice.odd_passes(said.passes)
        if joined == 0:  # a rank that has joined counts no steps, so it could not follow another plan
            plan = self._planner.exchanged(seconds, 0 if here.overlap is None else here.overlap.failed)
            if plan is not None:
                self._follow(plan, self._parameters)

    def _with_present_parameters(self) -> HostGradients:
        """Return the gradients of the parameters that are trained now. Make buckets anew if a parameter was frozen or added."""
        parameters = self._with_known_layout(self._context.dense())
        if not are_same(parameters, self._parameters):  # all ranks must find the same
            self._here.drain()
            renumber = getattr(self._context.options.aggregator, "renumber", None)
            if renumber is not None:
                now = {id(parameter): number for number, parameter in enumerate(parameters)}
                before = enumerate(map(id, self._parameters))
                renumber({number: now[each] for number, each in before if each in now})
            self._prepare(parameters)
        if self._shards is not None:
            self._shards.check_memory()
        return self._here

    def _hear_news(self, own: Sequence[int]) -> None:
        """Let all ranks know which gradients are sparse, and dtype and shape of compressed ones. Every rank calls this.

        Args:
            own: The numbers of this rank's gradients that are sparse.
        """
        context = self._context
        found = {index for indices in context.gather(own) for index in indices or ()}
        context.set_aside([self._parameters[index] for index in sorted(found)])
        if self._encodings is not None:
            context.set_aside(self._encodings.agree(context.dense()))

    def after_step(self) -> None:
        self.results.publish()

    # This rank has run out of data, and other ranks have not (`hvdlite.join`)

    def have_same_state(self) -> None:
        self.missed = False
        if self._shards is not None:
            self._shards.have_same_state()

    def stand_in(self) -> list[bool] | None:
        there = self._here.reducer.try_to_stand_in()
        self.missed = self.missed or there is not None
        return there
