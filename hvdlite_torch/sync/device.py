"""`DeviceSync` combines the gradients of one torch optimizer on a GPU.

`hvdlite.gradients.device` owns the buckets and the order in which they are launched. This module connects torch's hooks and
``p.grad`` with them. A bucket is launched as soon as a backward pass has all of its gradients, if the profile of the training
loop (`hvdlite.gradients.device.loop_profile`) allows it: gradients that have been sent must not change afterwards. If they
do change, the sent gradients are incomplete, and the step raises an error.

With one rank, nothing is copied, launched or hooked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import hvdlite
from hvdlite.errors import UnsupportedTensorError
from hvdlite.gradients import header
from hvdlite.gradients.device.bucket import DeviceBucket, ParameterBucket
from hvdlite.gradients.device.late_changes import lost_gradients
from hvdlite.gradients.device.make import make_reducer
from hvdlite.gradients.device.reducer import DeviceReducer
from hvdlite.gradients.device.rules import Rules, cast_of
from hvdlite.gradients.planner import longest
from hvdlite.gradients.reducer import check_combinable
from hvdlite.protocols import Device
from hvdlite_torch.step.context import OptimizerContext
from hvdlite_torch.step.gradient_sync import GradientSync
from hvdlite_torch.step.lease import weakly
from hvdlite_torch.step.sharding import Sharding
from hvdlite_torch.step.shards import refuse_sparse
from hvdlite_torch.sync.backward import BackwardPasses, TorchGradientState
from hvdlite_torch.sync.device_gradients import DeviceGradients, SentBefore, layout_of
from hvdlite_torch.sync.device_sharded import DeviceShards
from hvdlite_torch.sync.sparse import combine_sparse
from hvdlite_torch.sync.whole import WholeResults
from hvdlite_torch.tensors.adapter import ADAPTER, are_same
from hvdlite_torch.tensors.gradient import as_dense

SPARE_ONE_RANK = True
"""Skip all work if there is one rank. Benchmarks and tests set this to False to run the rest on one GPU."""


class DeviceSync(GradientSync):
    """The `GradientSync` for gradients on a device.

    Between ``backward()`` and ``step()``, ``p.grad`` is this rank's gradient or already the combined one. After `combine` it
    is the combined one.

    Args:
        context: The optimizer. All its parameters are on one device.
        sharding: The shard that this rank steps; None if this rank steps all parameters.

    Raises:
        ArgumentError: Gradients on a device cannot be combined by this `op`, or compressed by this compressor.
    """

    missed = True

    def __init__(self, context: OptimizerContext, sharding: Sharding | None) -> None:
        options = context.options
        check_combinable(options.op)
        super().__init__(context)
        self._cast = "" if options.codec is None else cast_of(options.codec.compressor)
        self._average = options.op is hvdlite.Average
        self._shards = None if sharding is None else DeviceShards(context, sharding)
        self.results = self._shards or WholeResults(context)
        self._reducer: DeviceReducer | None = None
        """The present buckets; None if this rank is alone, or if the world has ended."""
        self._parameters: list[torch.Tensor] = []
        """The parameters whose gradients are dense on all ranks."""
        self._payload = 0
        """The bytes of their gradients."""
        self._sent = SentBefore()

    def begin(self) -> None:
        """Make buckets and hooks in the present world.

        Raises:
            UnsupportedTensorError: The parameters are on several devices.
            HvdliteError: A rank has no memory for the buckets. The error is raised on all ranks.
        """
        context, parameters = self._context, self._context.trained()
        self._device = device_of(parameters)
        group = context.group
        self._collectives = group.device_collectives(self._device)
        context.lease.close = self._collectives.close
        self._alone = self._collectives.size == 1 and SPARE_ONE_RANK
        waiting = context.waiting_for("what the other ranks say with their gradients")
        self._group = context.together, group.engine.run, waiting
        wanted = context.options.overlap
        self._launches = context.config.overlap != "off" if wanted is None else wanted
        self._prepare(parameters)

    def leave(self) -> None:
        if self._reducer is not None:
            self._sent.remember(self._reducer)
        self._reducer, self._gradients = None, DeviceGradients(self._parameters, None)
        self._backward.follow(self._gradients)
        if self._shards is not None:
            self._shards.leave()

    # Memory and hooks

    def _prepare(self, parameters: list[torch.Tensor]) -> None:
        """Begin to combine the dense gradients of `parameters`, with a new loop profile. Every rank calls this."""
        self._backward = BackwardPasses(DeviceGradients(parameters, None), self._device, self._launches)
        self._follow(parameters, range(len(parameters) - 1, -1, -1))  # roughly the order of backward passes

    def _follow(self, parameters: list[torch.Tensor], order: Sequence[int]) -> None:
        """Make buckets and hooks for `parameters`, whose gradients are expected in `order`. Every rank calls this."""
        self._reducer, self._gradients = None, DeviceGradients(parameters, None)  # frees memory for the new ones
        self._backward.follow(self._gradients)
        if self._shards is not None:
            self._shards.collect()
        if not self._alone:
            kind = DeviceBucket if self._shards is None else ParameterBucket
            how = self._rules(), self._context.config.bucket_bytes, *self._group, kind
            self._reducer = make_reducer(layout_of(parameters), order, self._collectives, *how)
        if self._shards is not None:
            self._shards.deal(parameters, self._reducer, self._collectives)
        self._parameters, self._gradients = parameters, DeviceGradients(parameters, self._reducer)
        self._payload = sum([parameter.numel() * parameter.element_size() for parameter in parameters])
        self._backward.follow(self._gradients)
        self.make_hooks()

    def _rules(self) -> Rules:
        codec = self._context.options.codec
        if self._shards is not None:
            return Rules(self._average, parts=self._collectives.size, whole=self._shards.whole)
        return Rules(self._average, self._cast, 1.0 if codec is None else codec.divisor)

    def make_hooks(self) -> None:
        lease = self._context.lease
        lease.remove_hooks()
        if self._alone and not self._context.step.counts_all:
            return
        for index, parameter in enumerate(self._parameters):
            hook = torch.compiler.disable(weakly(self, "ready", index))  # or dynamo traces it
            lease.add_hook(parameter, hook)

    def ready(self, index: int, parameter: torch.Tensor) -> None:
        step = self._context.step
        step.count_pass(parameter)
        self._backward.capture.saw_backward()
        if step.quiet or self._reducer is None:
            return
        if self._backward.take(index, parameter, step.weight.value, step.allowed):
            self._lose("a backward pass has added to them")

    # A step

    def leave_out(self) -> None:
        self._lose("the step was taken within skip_synchronize(), without a synchronize() before")

    def changed_unseen(self, how: str) -> None:
        self._lose(how)
        self._backward.profile.settled = False

    @torch.no_grad()
    def after_step(self) -> None:
        self.results.publish()

    @torch.no_grad()
    def combine(self) -> None:
        if (counts := self._context.counts) is not None:
            counts.step()
            counts.nbytes += self._payload
        if self._alone:
            self._combine_alone()
            return
        self._backward.check_capture(self._parameters, self._context.step.weight.value)
        joined, weight = self._combine_dense()
        if self._context.sparse:
            combine_sparse(self._context.sparse, weight, self._average, self._context.process_set)
        if self._backward.profile.learning and not joined and self._backward.profile.stepped():
            self._learned()

    def _combine_alone(self) -> None:
        weight = self._context.take_weight()
        if problem := self._sent.problem(self._device, self._parameters):
            raise lost_gradients(problem)
        self._parameters = self._context.trained()
        for parameter in self._parameters if self._context.options.sparse_as_dense else ():
            if parameter.grad is not None:
                parameter.grad = as_dense(parameter.grad, parameter.shape, parameter.dtype, True)
        there = any([parameter.grad is not None for parameter in self._parameters])
        header.check_divisor(self._average, weight, there)
        self._context.check_step(there, weight)

    def _combine_dense(self) -> tuple[bool, float]:
        """Combine the dense gradients.

        Returns:
            Whether a rank has joined, which is known only while the loop's profile is learned; and the weight of this rank.
        """
        context, joined = self._context, False
        if not are_same(parameters := context.dense(), self._parameters):
            # All ranks must find this. Some have perhaps sent gradients: so all finish that exchange, undo it and repeat it.
            self._finish(self._gradients.now(), context.step.weight.value)
            self._undo(context.step.weight.value)
            self._prepare(parameters)
        if self._shards is not None:
            self._shards.check_memory()
        while True:
            gradients = self._gradients.now()
            news = self._make_dense(gradients)
            if not self._backward.profile.learning:
                break
            self._backward.profile.step(TorchGradientState(self._gradients.now()), context.step.weight.value)
            context.advice.before_exchange(self._parameters)
            answers = context.gather((news, context.header(bool(news))))
            joined = None in answers
            found = {index for answer in answers if answer is not None for index in answer[0]}
            if not found:
                self._compare([answer[1] for answer in answers if answer is not None])
                break
            context.set_aside([self._parameters[index] for index in sorted(found)])
            self._prepare(context.dense())
        weight = context.take_weight()
        assert self._reducer is not None
        if news:
            problem = "a parameter has sparse gradients that had dense ones, or none, in the first steps"
        elif self._reducer.launched:
            problem = self._reducer.what_changed(self._gradients.now(), weight)
        else:
            problem = self._sent.problem(self._device, self._parameters)
        self._finish(gradients, weight, problem)
        return joined, weight

    def _compare(self, everybody: Sequence[header.Header]) -> None:
        """Raise or warn if the headers of the ranks do not fit together. Every rank calls this."""
        told = header.read([], [sum(each) for each in zip(*map(header.words, everybody), strict=True)])
        if told.stopped:
            self._backward.begin_step()
            self._context.refuse(told)
        if told.odd_passes:
            self._context.advice.odd_passes(self._context.step.passes)

    def _make_dense(self, gradients: list[torch.Tensor | None]) -> list[int]:
        """Do as `DeviceGradients.make_dense`, and raise if sparse gradients remain and parameters are sharded."""
        news = self._gradients.make_dense(gradients, self._context.options.sparse_as_dense)
        if news and self._shards is not None:
            refuse_sparse(self._gradients.like[news[0]][0])
        return news

    def _finish(self, gradients: Sequence[torch.Tensor | None], weight: float, problem: str = "") -> None:
        """Launch the remaining buckets, then give out the combined gradients. Raise if sent gradients have a `problem`."""
        assert self._reducer is not None
        state = self._context.in_step.digest(rates_only=True)
        self._gradients.finish(gradients, header.Header(weight, again=bool(problem), state=state))
        self._backward.begin_step()
        if problem:
            raise lost_gradients(problem)
        there = [gradient is not None for gradient in gradients]
        if asked := self._reducer.find_out(there, weight):
            divisor = self._reducer.told.divisor
            header.check_divisor(self._average, divisor, any(there))
            self._context.check_step(any(there), divisor)
        if self._shards is not None:
            self._shards.give(there)
        elif asked:  # the others' gradients, which this rank lacks, are here too
            self._gradients.give(there)

    def _undo(self, weight: float) -> None:
        """Scale the gradients so that combining them once more gives the right result."""
        divisor = 1.0 if self._average else float(self._collectives.size)
        if self._shards is not None:  # sent gradients were multiplied in place, and the pieces are not stepped
            divisor = weight or 1.0
        self._gradients.divide(divisor)

    def _learned(self) -> None:
        """Lay the gradients out in the order that the loop profile has learned. Every rank calls this."""
        self._backward.launches = self._launches = self._launches and self._backward.profile.settled
        if self._shards is None:  # sharded buckets keep the guessed order: a new order would move all parameters
            self._follow(self._parameters, longest(self._context.gather(list(self._backward.profile.order))))

    def _lose(self, what: str) -> None:
        """Tell all ranks that sent gradients have changed since, and raise, if any were sent. `what` is the reason in words."""
        if self._reducer is None or not self._reducer.launched:
            return
        gradients = self._gradients.now()
        self._make_dense(gradients)
        self._finish(gradients, self._reducer.sent_weight or 0.0, what)

    # This rank has run out of data, and other ranks have not

    @torch.no_grad()
    def stand_in(self) -> list[bool] | None:
        if self._reducer is None:
            return None
        there = self._reducer.stand_in()
        if there is not None:
            self._context.group.stood_in += 1
        return there


def device_of(parameters: Sequence[torch.Tensor]) -> Device:
    """Return the device that the parameters of an optimizer are on. At least one parameter is on a device.

    Raises:
        UnsupportedTensorError: The parameters are on several devices, or some are in host memory.
    """
    places = list(dict.fromkeys(parameter.device for parameter in parameters))
    if len(places) > 1:
        raise UnsupportedTensorError(
            f"the parameters of this optimizer are on {', '.join(map(str, places))}; expected one device. Move the model to "
            "one, or make an optimizer for the parameters of each."
        )
    return ADAPTER.device(parameters[0])
