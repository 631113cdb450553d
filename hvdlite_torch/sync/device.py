"""The gradients of one optimizer on a GPU, on one rank: flat buckets, launched while the backward pass goes on.

::

    current stream   … backward ─┬─ pack bucket 0 … backward ─┬─ pack bucket 1 …   ┬─ pack the last ─┐        ┌─ step
    communication                └─▶ sum over the ranks, divide ─▶ sum, divide     └─▶ sum, divide ──┴─ event ┘

Every rank launches every bucket once for each step, in the same order, whatever it has; so no rank has to ask another. The
last one is launched by the step, the others as soon as their gradients are there, if the loop's habits
(`hvdlite_torch.sync.loop_profile`) allow it: what is sent must not change afterwards. Where a loop breaks its habits,
gradients that have been sent are incomplete and nothing can mend that without waiting for the other ranks in every step. It is
an error, on all ranks: on this one at once, on the others in their next steps, for the last bucket tells them
(`hvdlite_torch.sync.late_changes`).

The host waits for the device only where it has to know what other ranks have said: in a step in which this rank lacks a
gradient, or has no samples. Nothing is copied, launched or hooked if there is one rank only.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

import torch

import hvdlite
from hvdlite.errors import ArgumentError, HvdliteError, UnsupportedTensorError
from hvdlite.gradients import header
from hvdlite.gradients.plan import plan_buckets
from hvdlite.gradients.planner import LEARNED_STEPS
from hvdlite.gradients.reducer import check_combinable
from hvdlite.operations import Agreement
from hvdlite.protocols import Device, Stream, TensorInfo
from hvdlite.tensors.reduction import nbytes_of
from hvdlite_torch.step.driver import SteppingExchange
from hvdlite_torch.step.lease import weakly
from hvdlite_torch.step.options import Options
from hvdlite_torch.sync.device_bucket import (
    FIRST_BYTES,
    DeviceBucket,
    DeviceHeader,
    DeviceHeaderSum,
    Rules,
    cast_of,
    order_of,
)
from hvdlite_torch.sync.late_changes import LateChanges, is_capturing, lost_gradients
from hvdlite_torch.sync.loop_profile import LoopProfile
from hvdlite_torch.sync.sparse import combine_sparse
from hvdlite_torch.tensors.adapter import ADAPTER
from hvdlite_torch.tensors.gradient import as_dense

SPARE_ONE_RANK = True
"""Do nothing where there is one rank. Benchmarks and tests turn this off, to see the rest on one GPU."""


class DeviceExchange(SteppingExchange):
    """Exchanges gradients on a device before the optimizer steps. See the module.

    Between ``backward()`` and ``step()``, ``p.grad`` may be this rank's or already the combined one; `synchronize` gives the
    combined ones.

    Args:
        optimizer: With parameters on one device. Its step hooks are made by `attach`.
        options: What the user asked for.

    Raises:
        UnsupportedTensorError: Parameters on several devices.
        HvdliteError: A rank has no room for the buckets. Raised on all of them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options) -> None:
        check_combinable(options.op)
        super().__init__(optimizer, options)
        if options.codec is not None:
            cast_of(options.codec)
        self._buckets: list[DeviceBucket] = []
        self._sent: list[torch.Tensor] = []
        """Memory of gradients that had been sent, and not been used by a step, when an earlier world ended."""
        self._divisor = 0.0
        self._begin()

    def _begin(self) -> None:
        options, parameters = self._options, self._trainable()
        self._device, self._place = device_of(parameters), parameters[0].device
        self._world.group(self.process_set).release_dropped()
        self._collectives = self._world.group(self.process_set).device_collectives(self._device)
        self.lease.close = self._collectives.close
        self._alone = self._collectives.size == 1 and SPARE_ONE_RANK
        self._average = options.op is hvdlite.Average
        wanted = options.overlap
        self._launches_early = self._world.config.overlap != "off" if wanted is None else wanted
        self._watching = self._world.watch.exchanging(
            lambda: "what the other ranks say with their gradients",
            self._world.group(self.process_set).members,
            remember=False,
        )
        self._prepare(parameters)

    def leave(self) -> None:
        super().leave()
        self._sent += [flat.memory for bucket in self._buckets[: self._launched] for flat in bucket.flats]
        self._buckets = []
        self._begin_step()

    # Memory

    def _prepare(self, parameters: list[torch.Tensor]) -> None:
        """Exchange the dense gradients of these parameters from now on."""
        self._habits = LoopProfile(len(parameters))
        self._habits.learning = not self._alone
        self._follow(parameters, range(len(parameters) - 1, -1, -1))  # which is about what backward passes do

    def _follow(self, parameters: list[torch.Tensor], order: Sequence[int]) -> None:
        """Make memory and hooks for `parameters`, whose gradients come in this order. Every rank calls this."""
        self._buckets = []
        if not self._alone:
            infos = [ADAPTER.info(parameter) for parameter in parameters]
            nbytes = [nbytes_of(info) for info in infos]
            plan = plan_buckets(order, nbytes, self._world.config.bucket_bytes, FIRST_BYTES)
            groups = plan or (tuple(range(len(parameters))),)
            layout = infos, [order_of(parameter) for parameter in parameters], groups, self._rules().summary
            arguments = [
                ("tensors", len(parameters)),
                ("op", self._options.op.value),
                ("compression", self._rules().wire_of("float32")),
                ("bucket_bytes", self._world.config.bucket_bytes),
                ("layout", hashlib.sha256(repr(layout).encode()).hexdigest()[:12]),
            ]
            agreement = Agreement("gradient buckets on a GPU", arguments, lambda _: None)
            self._world.engine(self.process_set).run(agreement)
            problem = ""
            buckets = []
            try:
                buckets = [self._make_bucket(infos, parameters, group) for group in groups]
            except torch.OutOfMemoryError as error:
                problem = f"no room for {sum(nbytes)} bytes of gradients on {self._place}: {error}"
            self._raise_together(problem)
            self._buckets = buckets
            self._reports = LateChanges(self._place, self._collectives.size)
            # An optimizer may be dropped while its gradients are on their way.
            for tensor in (self._reports.memory, *(each for bucket in buckets for each in bucket.memory())):
                self._device.keep(tensor, self._stream)
        self._parameters = parameters
        self._shapes = [(parameter.shape, parameter.dtype) for parameter in parameters]
        self._bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket.tensors}
        self._begin_step()
        self._make_hooks()

    def _rules(self) -> Rules:
        return Rules(self._average, self._options.codec)

    def _make_bucket(
        self, infos: Sequence[TensorInfo], parameters: Sequence[torch.Tensor], group: Sequence[int]
    ) -> DeviceBucket:
        return DeviceBucket(infos, parameters, group, self._place, self._collectives, self._rules())

    def _raise_together(self, problem: str) -> None:
        """Raise on all ranks if one has a problem."""
        ranks = self._world.ranks(self.process_set)
        problems = [f"rank {rank}: {text}" for rank, text in zip(ranks, self._gather(problem), strict=True) if text]
        if problems:
            raise HvdliteError("; ".join(problems))

    def _make_hooks(self) -> None:
        self.lease.remove_hooks()
        if self._alone and not self._sees_all:
            return
        for index, parameter in enumerate(self._parameters):
            hook = torch.compiler.disable(weakly(self, "_take", index))  # type: ignore[no-untyped-call]  # else it is looked into
            self.lease.hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    # During a backward pass

    def _begin_step(self) -> None:
        self._launched = 0
        self._seals: list[tuple[int, ...]] = []
        """Of each bucket that is launched: the versions of its memory then."""
        self._sent_weight: float | None = None
        self._counts = [0] * len(self._parameters)
        self._missing = [len(bucket.tensors) for bucket in self._buckets]
        self._waits_after_pass = False
        self._captured: bool | None = None
        """Whether this step's first backward pass became part of a CUDA graph; None before it."""

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        """The hook of a parameter: a backward pass has added to its gradient."""
        self._count_pass(index)
        if self._captured is None:
            self._captured = is_capturing()
        if self._quiet or self._alone:
            return
        if self._habits.learning:
            self._habits.saw(index, self._weight.value, self._device.current().handle)
            self._call_after_pass()
            return
        self._counts[index] += 1
        if self._counts[index] != (self._options.passes if self._options.passes > 1 else self._habits.passes[index]):
            if self._bucket_of[index] < self._launched:
                self._lose("a backward pass has added to them")
            return
        gradient = parameter.grad
        if (
            not self._launches_early
            or gradient is None
            or gradient.requires_grad
            or gradient.layout is not torch.strided
            or (gradient.shape, gradient.dtype) != self._shapes[index]
        ):
            return  # the step sees to it
        self._missing[self._bucket_of[index]] -= 1
        while self._launched < len(self._buckets) - 1 and self._missing[self._launched] == 0:
            if self._sent_weight is None:
                self._sent_weight = self._weight.value
            bucket = self._buckets[self._launched]
            self._launch(bucket, [self._parameters[i].grad for i in bucket.tensors], self._sent_weight)
            self._seals.append(bucket.versions)
            self._launched += 1
            self._call_after_pass()

    def _call_after_pass(self) -> None:
        """Have torch call `_after_pass` when this backward pass is over."""
        if not self._waits_after_pass:
            self._waits_after_pass = True
            torch.autograd.Variable._execution_engine.queue_callback(self._after_pass)

    def _after_pass(self) -> None:
        self._waits_after_pass = False
        if self._habits.learning:
            self._habits.pass_over([parameter.grad for parameter in self._parameters])
        else:
            self._wait()  # whoever looks at gradients now is to see combined ones

    @torch.no_grad()
    def _launch(
        self,
        bucket: DeviceBucket,
        gradients: Sequence[torch.Tensor | None],
        weight: float,
        joined: bool = False,
        lost: bool = False,
    ) -> None:
        """Put the exchange of a bucket on the streams. Afterwards ``p.grad`` are views of it."""
        if bucket is self._buckets[0]:
            self._collectives.check()
            self._reports.check()
        for memory in bucket.leave_what_is_held(gradients):
            self._device.keep(memory, self._stream)
        bucket.pack(gradients, weight)
        state = self._in_step.digest(rates_only=True) if bucket is self._buckets[-1] and not joined else 0
        bucket.say(DeviceHeader(tuple([gradient is not None for gradient in gradients]), weight, joined, lost, state))
        bucket.scale_before(weight)
        stream = self._stream
        stream.wait(self._device.current().record())
        with self._device.on(stream):
            bucket.exchange(stream)
        for index, gradient in zip(bucket.tensors, gradients, strict=True):
            if gradient is not None:
                self._give_one(bucket, index)

    def _give_one(self, bucket: DeviceBucket, index: int) -> None:
        parameter = self._parameters[index]
        if not bucket.is_home(index, parameter.grad):
            parameter.grad = bucket.lend(index)

    @property
    def _stream(self) -> Stream:
        return self._collectives.stream

    def _wait(self) -> None:
        """Let the current stream wait for what is on its way. The host does not."""
        self._device.current().wait(self._stream.record())

    # A step

    def _before_plain_step(self) -> None:
        if self._skip and self._launched:
            self._lose("the step was taken within skip_synchronize(), without a synchronize() before")
        super()._before_plain_step()

    @torch.no_grad()
    def _exchange(self) -> None:
        self._check_in_effect()
        if self._alone:
            self._exchange_alone()
            return
        self._check_capture()
        joined = self._exchange_dense()
        if self._sparse:
            combine_sparse(self._sparse, self._taken_weight, self._average, self.process_set)
        self._synchronized = True
        self._passes.clear()
        if self._habits.learning and not joined and self._habits.stepped():
            self._learned()

    def _check_capture(self) -> None:
        """Raise if a CUDA graph is captured that cannot be replayed.

        Raises:
            ArgumentError: The text says why.
        """
        problem = ""
        if not is_capturing():
            if self._captured:
                problem = (
                    "the backward pass was captured into a CUDA graph, and the step was not: capture optimizer.step() as well. "
                    "Replays run no hooks, so nobody would know where the gradients of the next pass are."
                )
        elif self._habits.learning:
            problem = (
                f"one of the first {LEARNED_STEPS} steps is captured into a CUDA graph, and the host waits in it: make some "
                "steps before."
            )
        elif self._weight.value == 0 or any([parameter.grad is None for parameter in self._parameters]):
            problem = (
                "a step is captured into a CUDA graph in which this rank has no samples, or lacks the gradient of a parameter, "
                "so that the host would wait in it. Freeze parameters that are not used (requires_grad_(False)) before."
            )
        if problem:
            self._begin_step()  # what follows may be steps without a graph
            raise ArgumentError(problem)

    def _exchange_alone(self) -> None:
        weight = self._take_weight()
        if problem := self._sent_before_restart():
            raise lost_gradients(problem)
        self._parameters = self._trainable()
        if self._options.sparse_as_dense:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad = as_dense(parameter.grad, parameter.shape, parameter.dtype, True)
        self._check_step(any([parameter.grad is not None for parameter in self._parameters]), weight)
        self._synchronized = True
        self._passes.clear()

    def _exchange_dense(self) -> bool:
        """Exchange the dense gradients. Returns whether a rank has joined, where that is known: while habits are learned."""
        joined = False
        if not self._are_known(parameters := self._dense_parameters()):
            # On every rank, or they disagree; but some may have sent what they have. So all do, and then once more.
            self._combine(self._weight.value)
            self._undo(self._weight.value)
            self._begin_step()
            self._prepare(parameters)
        while True:
            gradients = [parameter.grad for parameter in self._parameters]
            news = self._make_dense(gradients)
            if not self._habits.learning:
                break
            self._habits.step([parameter.grad for parameter in self._parameters], self._weight.value)
            self._advice.before_exchange(self._parameters)
            answers = self._gather((news, self._said(bool(news))))
            joined = None in answers
            found = {index for answer in answers if answer is not None for index in answer[0]}
            if not found:
                self._compare([answer[1] for answer in answers if answer is not None])
                break
            self._set_apart(found)
        weight = self._take_weight()
        self._taken_weight = weight
        problem = self._what_changed(weight) if self._launched else self._sent_before_restart()
        if news:
            problem = "a parameter has sparse gradients that had dense ones, or none, in the first steps"
        self._combine(weight, problem, gradients)
        return joined

    def _compare(self, everybody: Sequence[header.Header]) -> None:
        """Raise, or warn, if the ranks have said what cannot be. Every rank calls this."""
        told = header.read([], [sum(each) for each in zip(*map(header.words, everybody), strict=True)])
        if told.stopped:
            self._begin_step()
            self._refuse(told)
        if told.odd_passes:
            self._advice.odd_passes(self._said(False).passes)

    def _set_apart(self, found: set[int]) -> None:
        """Exchange the gradients of these parameters as sparse ones from now on. Every rank calls this."""
        self._sparse = [*self._sparse, *(self._parameters[index] for index in sorted(found))]
        self._prepare(self._dense_parameters())

    def _make_dense(self, gradients: list[torch.Tensor | None]) -> list[int]:
        """Replace sparse gradients by dense ones where that is wanted. Returns the numbers of the others."""
        news = []
        for index, (gradient, like) in enumerate(zip(gradients, self._shapes, strict=True)):
            if gradient is None or (gradient.layout is torch.strided and (gradient.shape, gradient.dtype) == like):
                continue
            dense = as_dense(gradient, *like, self._options.sparse_as_dense)
            if dense is None:
                self._check_sparse(index)
                news.append(index)
            gradients[index] = dense
        return news

    def _check_sparse(self, index: int) -> None:
        """Raise if sparse gradients are not supported."""

    def _what_changed(self, weight: float) -> str:
        """In what this step is not what was sent; empty if it is."""
        if weight != self._sent_weight:
            return "the weight of the batch was set after the backward pass"
        for bucket, seal in zip(self._buckets, self._seals, strict=False):
            if bucket.versions != seal or any(
                [not bucket.is_home(index, self._parameters[index].grad) for index in bucket.tensors]
            ):
                return "they were changed after the backward pass"
        return ""

    def _sent_before_restart(self) -> str:
        """Whether some gradients had been sent before shutdown() and init() already, in words; empty if not."""
        sent, self._sent = {memory.untyped_storage().data_ptr() for memory in self._sent}, []
        gradients = [parameter.grad for parameter in self._parameters] if sent else []
        if any([gradient is not None and gradient.untyped_storage().data_ptr() in sent for gradient in gradients]):
            return "shutdown() and init() came between the backward pass and the step (zero_grad() and another pass mend that)"
        return ""

    def _combine(
        self, weight: float, problem: str = "", gradients: Sequence[torch.Tensor | None] | None = None
    ) -> None:
        """Launch what has not been yet, and give every parameter its combined gradient.

        Args:
            weight: This rank's.
            problem: What was sent is not what it should be.
            gradients: Of all parameters, dense.
        """
        if gradients is None:
            gradients = [parameter.grad for parameter in self._parameters]
        gradients = self._apart_from_buckets(gradients)
        for bucket in self._buckets[self._launched :]:
            self._launch(bucket, [gradients[index] for index in bucket.tensors], weight, lost=bool(problem))
        last = self._buckets[-1]
        with self._device.on(self._stream):
            self._reports.send(last.tail, self._stream)
        self._wait()
        self._begin_step()
        if problem:
            raise lost_gradients(problem)
        self._deliver(gradients, weight)

    def _apart_from_buckets(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Copies of those gradients that lie where another one is expected (swapped ones): that is about to be overwritten."""
        memory = {flat.memory.untyped_storage().data_ptr() for bucket in self._buckets for flat in bucket.flats}
        return [
            gradient.clone()
            if gradient is not None
            and not self._buckets[self._bucket_of[index]].is_home(index, gradient)
            and gradient.untyped_storage().data_ptr() in memory
            else gradient
            for index, gradient in enumerate(gradients)
        ]

    def _deliver(self, gradients: Sequence[torch.Tensor | None], weight: float) -> None:
        """Where this rank has no gradient, find out whether another has one, and take it."""
        there = [gradient is not None for gradient in gradients]
        asks = [bucket for bucket in self._buckets if weight == 0 or not all([there[i] for i in bucket.tensors])]
        if asks:
            divisor = 1.0
            for bucket, told in zip(asks, self._read(asks), strict=True):
                divisor = told.weight
                for index, somewhere in zip(bucket.tensors, told.anywhere, strict=True):
                    there[index] = there[index] or somewhere
            self._check_step(any(there), divisor)
        self._give(there)

    def _check_step(self, anywhere: bool, divisor: float) -> None:
        if self._average and divisor <= 0 and anywhere:
            raise HvdliteError(
                "the weights of all ranks add up to 0, so their gradients have no average: skip this step on all ranks."
            )
        super()._check_step(anywhere, divisor)

    def _give(self, there: Sequence[bool]) -> None:
        """Let parameters have the combined gradients: those that have one somewhere."""
        for bucket in self._buckets:
            for index in bucket.tensors:
                if there[index]:
                    self._give_one(bucket, index)

    def _read(self, buckets: Sequence[DeviceBucket]) -> list[DeviceHeaderSum]:
        """The tails of buckets that the current stream has waited for. The host waits."""
        ends = list(itertools.accumulate([len(bucket.tail) for bucket in buckets], initial=0))
        together = self._device.empty([ends[-1]], "float64")
        self._device.pack([bucket.tail for bucket in buckets], together)
        with self._watching:
            values = self._device.to_host(together).tolist()
        self._collectives.check()  # what is given up ends, too
        return [DeviceHeaderSum.of(values[start:stop]) for start, stop in itertools.pairwise(ends)]

    def _undo(self, weight: float) -> None:
        """Let the combined gradients be such that exchanging them once more changes nothing."""
        if not self._average:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self._collectives.size)

    def _learned(self) -> None:
        """The habits are known: lay the gradients out in their order. Every rank calls this."""
        orders: list[list[int]] = self._gather(list(self._habits.order))
        self._launches_early = self._launches_early and self._habits.settled
        self._follow(self._parameters, max(orders, key=len))  # somebody may have had no samples

    def _lose(self, what: str) -> None:
        """A backward pass of this rank has gone on after its gradients were sent: tell all."""
        gradients = [parameter.grad for parameter in self._parameters]
        self._make_dense(gradients)
        self._combine(self._sent_weight or 0.0, what, gradients)

    # This rank has run out of data, and others have not

    @torch.no_grad()
    def _stand_in_once(self) -> list[bool] | None:
        if self._alone:
            return None
        for bucket in self._buckets:
            self._launch(bucket, [None] * len(bucket.tensors), 0.0, joined=True)
        self._wait()
        there = [False] * len(self._parameters)
        told = self._read(self._buckets)
        self._divisor = told[-1].weight
        for bucket, each in zip(self._buckets, told, strict=True):
            for index, somewhere in zip(bucket.tensors, each.anywhere, strict=True):
                there[index] = somewhere
        if told[-1].joined == self._collectives.size:
            return None
        self._world.group(self.process_set).stood_in += 1
        return there


def device_of(parameters: Sequence[torch.Tensor]) -> Device:
    """The device of the parameters of an optimizer, of which at least one is on one.

    Raises:
        UnsupportedTensorError: They are on several, or some are in host memory.
    """
    places = list(dict.fromkeys(parameter.device for parameter in parameters))
    if len(places) > 1:
        raise UnsupportedTensorError(
            f"the parameters of this optimizer are on {', '.join(map(str, places))}; expected one device. Move the model to "
            "one, or make an optimizer for the parameters of each."
        )
    return ADAPTER.device(parameters[0])
