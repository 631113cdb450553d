"""Gradients on a device that a program has all at once. The ranks exchange headers in host memory first.

::

    host     headers of all ranks ─▶ all ranks put the exchange off, or all raise an error; or:
    device                           pack ─▶ sum over the ranks, divide ─▶ views of the buckets

An optimizer that launches buckets during its backward pass cannot ask the other ranks first. A program that has all gradients
of a step at once can ask: a header in host memory is one short message. So no rank has to wait for its device to learn which
gradients there are, that a rank has other gradients now, or that a rank has run out of data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdlite.comm.gpu.collectives import DeviceCollectives
from hvdlite.comm.gpu.groups import Devices
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.gradients.device.bucket import DeviceBucket
from hvdlite.gradients.device.reducer import DeviceReducer
from hvdlite.gradients.device.rules import Rules
from hvdlite.gradients.header import Header
from hvdlite.gradients.planner import plan_buckets
from hvdlite.gradients.reducer import Reducer, ReducerContext
from hvdlite.operations.on_device import agree
from hvdlite.protocols import Device, Plan, ReduceOp, TensorInfo
from hvdlite.tensors.reduction import nbytes_of


class AnnouncedReducer(Reducer):
    """The gradients of one layout on a device, on one rank. All ranks make one, with equal arguments.

    In host memory this is a reducer of tensors without elements, so only headers travel there.

    Args:
        infos, collectives, op, plan, context: See `Reducer`.
        kind: The `Device.kind` of the devices of all ranks.
        devices: The devices of this rank.
    """

    def __init__(
        self,
        infos: Sequence[TensorInfo],
        collectives: HierarchicalCollectives,
        op: ReduceOp,
        plan: Plan,
        context: ReducerContext,
        kind: str,
        devices: Devices,
    ) -> None:
        nothing = [TensorInfo(info.dtype, (0,)) for info in infos]
        super().__init__(nothing, collectives, op, Plan(), context)
        self._infos, self._bucket_bytes = infos, plan.message_bytes
        self.buckets[0].payload = sum(map(nbytes_of, infos))  # on the device
        self._kind, self._devices = kind, devices
        self._about = f"{len(infos)} tensors on {kind}"
        self._on_device: tuple[DeviceReducer, DeviceCollectives] | None = None

    def combine(self, gradients: Sequence[Any], said: Header, device: Device) -> list[Any]:
        """Combine the gradients over the ranks.

        Args:
            gradients: Tensors of `device`, with the dtypes and shapes of the layout; None where this rank has no gradient. The
                tensors are only read.
            said: What this rank tells the other ranks.
            device: The device of this rank.

        Returns:
            For each gradient, a tensor on the device, which is ready on the current stream. Nobody overwrites the tensor as
            long as it exists. None if no rank has the gradient.

        Raises:
            Postponed, HvdliteError: See `Reducer.exchange`.
            DeviceError: A rank cannot take part, for example because it has no memory. All ranks raise it.
        """
        self._devices.choose(device)
        anywhere = self.exchange([gradient is not None for gradient in gradients], said)
        if not any(anywhere):
            return [None] * len(gradients)
        reducer = self._finish(gradients, Header(said.weight), device)
        stream = device.current()
        for gradient in gradients:
            if gradient is not None:
                device.keep(gradient, stream)  # its memory may belong to another library
        return [device.alias(reducer.view_of(i)) if there else None for i, there in enumerate(anywhere)]

    def stand_in(self) -> list[bool] | None:
        there = super().stand_in()
        if there is not None and any(there):
            self._finish([None] * len(there), Header(0.0, joined=True), None)
        return there

    def close(self) -> None:
        if self._on_device is not None:
            self._on_device[1].close()
            self._on_device = None
        super().close()

    def _finish(self, gradients: Sequence[Any], said: Header, device: Device | None) -> DeviceReducer:
        if self._on_device is None:
            with self._watch.guarded(lambda: f"the memory of {self._about}", self._members, link=self._link):
                self._on_device = self._make(device)
        reducer = self._on_device[0]
        reducer.finish(gradients, said)
        return reducer

    def _make(self, device: Device | None) -> tuple[DeviceReducer, DeviceCollectives]:
        """Make the buckets. Every rank calls this in the first exchange on the device, also a rank that has joined."""
        host = self._collectives
        made = self._devices.connect(host.duplicate(), self._members, self._kind, device)
        nbytes = [nbytes_of(info) for info in self._infos]
        groups = plan_buckets(range(len(nbytes)), nbytes, self._bucket_bytes) or (tuple(range(len(nbytes))),)
        layout = [(info, _strides(info.shape)) for info in self._infos]
        problem: Exception | None = None
        try:
            buckets = [DeviceBucket(layout, group, made, Rules(self._average)) for group in groups]
        except made.device.no_memory as error:
            problem = error
        try:
            agree(host, problem)
        except BaseException:
            made.close()
            raise
        return DeviceReducer(buckets, len(layout), made, self.waiting), made


def _strides(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor of this shape, in elements."""
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * max(1, length))
    return strides[::-1] if shape else []
