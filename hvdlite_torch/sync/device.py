"""The gradients of one optimizer on a GPU, on one rank: what torch's parameters and backward passes have to do with them.

The buckets, and the sequence in which they are launched, are those of `hvdlite.gradients.device`. A bucket is launched as soon
as a backward pass has its gradients, if the loop's habits (`hvdlite.gradients.device.loop_profile`) allow it: what is sent must
not change afterwards. Where a loop breaks its habits, gradients that have been sent are incomplete, and the step is an error.

Nothing is copied, launched or hooked if there is one rank only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import hvdlite
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.gradients import header
from hvdlite.gradients.device.bucket import DeviceBucket
from hvdlite.gradients.device.late_changes import lost_gradients
from hvdlite.gradients.device.make import Together, make_reducer
from hvdlite.gradients.device.reducer import DeviceReducer
from hvdlite.gradients.device.rules import Rules, cast_of
from hvdlite.gradients.plan import longest
from hvdlite.gradients.reducer import check_combinable
from hvdlite.protocols import Device
from hvdlite_torch.step.driver import SteppingExchange
from hvdlite_torch.step.lease import weakly
from hvdlite_torch.step.options import Options
from hvdlite_torch.sync.backward import BackwardPasses
from hvdlite_torch.sync.device_gradients import DeviceGradients, layout_of
from hvdlite_torch.sync.gradient_state import TorchGradientState
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

    _bucket = DeviceBucket

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options) -> None:
        check_combinable(options.op)
        super().__init__(optimizer, options)
        self._cast = "" if options.codec is None else cast_of(options.codec.compressor)
        self._reducer: DeviceReducer | None = None
        """None if this rank is alone."""
        self._sent: list[torch.Tensor] = []
        """Memory of gradients that had been sent, and not been used by a step, when an earlier world ended."""
        self._divisor = 0.0
        self._begin()

    def _begin(self) -> None:
        options, parameters = self._options, self._trainable()
        self._device = device_of(parameters)
        group = self._world.group(self.process_set)
        group.release_dropped()
        self._collectives = group.device_collectives(self._device)
        self.lease.close = self._collectives.close
        self._alone = self._collectives.size == 1 and SPARE_ONE_RANK
        self._average = options.op is hvdlite.Average
        waiting = self._world.watch.exchanging(
            lambda: "what the other ranks say with their gradients", group.members, remember=False
        )
        self._group = Together(group.engine.run, self._gather, group.ranks, waiting)
        self._launches = self._world.config.overlap != "off" if options.overlap is None else options.overlap
        self._prepare(parameters)

    def leave(self) -> None:
        super().leave()
        if self._reducer is not None:
            self._sent += self._reducer.sent_memory()
        self._reducer = None
        self._backward.follow(DeviceGradients(self._parameters, None))

    # Memory

    def _prepare(self, parameters: list[torch.Tensor]) -> None:
        """Exchange the dense gradients of these parameters from now on."""
        self._backward = BackwardPasses(DeviceGradients(parameters, None), self._device, self._launches)
        self._follow(parameters, range(len(parameters) - 1, -1, -1))  # which is about what backward passes do

    def _follow(self, parameters: list[torch.Tensor], order: Sequence[int]) -> None:
        """Make memory and hooks for `parameters`, whose gradients come in this order. Every rank calls this."""
        self._reducer, self._gradients = None, DeviceGradients(parameters, None)  # room for the new ones
        self._backward.follow(self._gradients)
        if not self._alone:
            how = self._rules(), self._world.config.bucket_bytes, self._group, self._bucket
            self._reducer = make_reducer(layout_of(parameters), order, self._collectives, *how)
        self._parameters, self._gradients = parameters, DeviceGradients(parameters, self._reducer)
        self._backward.follow(self._gradients)
        self._make_hooks()

    def _rules(self) -> Rules:
        codec = self._options.codec
        return Rules(self._average, self._cast, 1.0 if codec is None else codec.divisor)

    def _make_hooks(self) -> None:
        self.lease.remove_hooks()
        if self._alone and not self._sees_all:
            return
        for index, parameter in enumerate(self._parameters):
            hook = torch.compiler.disable(weakly(self, "_take", index))  # type: ignore[no-untyped-call]  # else it is looked into
            self.lease.hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        """The hook of a parameter: a backward pass has added to its gradient."""
        self._count_pass(index)
        if self._backward.capture.backward is None:
            self._backward.capture.saw_backward()
        if self._quiet or self._reducer is None:
            return
        if self._backward.take(index, parameter, self._weight.value, self._options.passes):
            self._lose("a backward pass has added to them")

    # A step

    def _before_plain_step(self) -> None:
        if self._skip and self._reducer is not None and self._reducer.launched:
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
        if self._backward.habits.learning and not joined and self._backward.habits.stepped():
            self._learned()

    def _check_capture(self) -> None:
        try:
            self._backward.capture.check_step(self._parameters, self._weight.value, self._backward.habits.learning)
        except ArgumentError:
            self._backward.begin_step()  # what follows may be steps without a graph
            raise

    def _exchange_alone(self) -> None:
        weight = self._take_weight()
        if problem := self._sent_before_restart():
            raise lost_gradients(problem)
        self._parameters = self._trainable()
        for parameter in self._parameters if self._options.sparse_as_dense else ():
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
            self._combine(self._gradients.now(), self._weight.value)
            self._undo(self._weight.value)
            self._prepare(parameters)
        while True:
            gradients = self._gradients.now()
            news = self._make_dense(gradients)
            if not self._backward.habits.learning:
                break
            self._backward.habits.step(TorchGradientState(self._gradients.now()), self._weight.value)
            self._advice.before_exchange(self._parameters)
            answers = self._gather((news, self._said(bool(news))))
            joined = None in answers
            found = {index for answer in answers if answer is not None for index in answer[0]}
            if not found:
                self._compare([answer[1] for answer in answers if answer is not None])
                break
            # From now on they are exchanged as sparse ones.
            self._sparse = [*self._sparse, *(self._parameters[index] for index in sorted(found))]
            self._prepare(self._dense_parameters())
        weight = self._taken_weight = self._take_weight()
        assert self._reducer is not None
        if news:
            problem = "a parameter has sparse gradients that had dense ones, or none, in the first steps"
        elif self._reducer.launched:
            problem = self._reducer.what_changed(self._gradients.now(), weight)
        else:
            problem = self._sent_before_restart()
        self._combine(gradients, weight, problem)
        return joined

    def _compare(self, everybody: Sequence[header.Header]) -> None:
        """Raise, or warn, if the ranks have said what cannot be. Every rank calls this."""
        told = header.read([], [sum(each) for each in zip(*map(header.words, everybody), strict=True)])
        if told.stopped:
            self._backward.begin_step()
            self._refuse(told)
        if told.odd_passes:
            self._advice.odd_passes(self._said(False).passes)

    def _make_dense(self, gradients: list[torch.Tensor | None]) -> list[int]:
        """See `DeviceGradients.make_dense`."""
        return self._gradients.make_dense(gradients, self._options.sparse_as_dense)

    def _sent_before_restart(self) -> str:
        """Whether some gradients had been sent before shutdown() and init() already, in words; empty if not."""
        sent, self._sent = set(map(self._device.allocation, self._sent)), []
        gradients = self._gradients.now() if sent else []
        if any([gradient is not None and self._device.allocation(gradient) in sent for gradient in gradients]):
            return "shutdown() and init() came between the backward pass and the step (zero_grad() and another pass mend that)"
        return ""

    def _combine(self, gradients: Sequence[torch.Tensor | None], weight: float, problem: str = "") -> None:
        """Launch what has not been yet, and give every parameter its combined gradient.

        Args:
            gradients: Of all parameters, dense.
            weight: This rank's.
            problem: What was sent is not what it should be.
        """
        assert self._reducer is not None
        state = self._in_step.digest(rates_only=True)
        self._gradients.finish(gradients, header.Header(weight, again=bool(problem), state=state))
        self._backward.begin_step()
        if problem:
            raise lost_gradients(problem)
        there = [gradient is not None for gradient in gradients]
        if self._reducer.find_out(there, weight):
            self._check_step(any(there), self._reducer.told.divisor)
        self._give(there)

    def _check_step(self, anywhere: bool, divisor: float) -> None:
        header.check_divisor(self._average, divisor, anywhere)
        super()._check_step(anywhere, divisor)

    def _give(self, there: Sequence[bool]) -> None:
        """Let parameters have the combined gradients: those that have one somewhere."""
        self._gradients.give(there)

    def _undo(self, weight: float) -> None:
        """Let the combined gradients be such that exchanging them once more changes nothing."""
        if not self._average:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self._collectives.size)

    def _learned(self) -> None:
        """The habits are known: lay the gradients out in their order. Every rank calls this."""
        orders: list[list[int]] = self._gather(list(self._backward.habits.order))
        self._launch_if_settled()
        self._follow(self._parameters, longest(orders))

    def _launch_if_settled(self) -> None:
        self._backward.launches = self._launches = self._launches and self._backward.habits.settled

    def _lose(self, what: str) -> None:
        """A backward pass of this rank has gone on after its gradients were sent: tell all."""
        assert self._reducer is not None
        gradients = self._gradients.now()
        self._make_dense(gradients)
        self._combine(gradients, self._reducer.sent_weight or 0.0, what)

    # This rank has run out of data, and others have not

    @torch.no_grad()
    def _stand_in_once(self) -> list[bool] | None:
        if self._reducer is None:
            return None
        there = self._reducer.stand_in()
        self._divisor = self._reducer.told.divisor
        if there is not None:
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
