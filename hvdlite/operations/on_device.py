"""Named operations on tensors that lie on a GPU.

::

    caller's stream    … makes x │ event      │ goes on …                     │ waits for the event, uses the result
                                 ▼ submit                                     ▲ handle.wait()
    our stream                     waits for it │ pack, collective, unpack │ event
                                                ▲ when all ranks have submitted theirs, from whichever thread drives the engine

The host never waits for the GPU. Before the collective, each rank tells the others in a message of a few bytes whether it has
found the memory that it needs. Without this message a rank without memory would leave the others in the collective for ever.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.algorithms.gather_bytes import allgather_text
from hvdlite.comm.gpu.groups import GroupCollectives
from hvdlite.errors import DeviceError
from hvdlite.protocols import Collectives, Device, ReduceOp
from hvdlite.ranks.together import Together


class DeviceInputs:
    """The tensors of one rank in an operation on a GPU.

    Args:
        tensors: The tensors of the caller, at least one, all on one device.
        adapters: The adapter of each tensor.

    Attributes:
        device: The device of the tensors.
        natives: The same memory as tensors of `device`.
        ready: An event that happens when the caller's stream has computed the values.
    """

    def __init__(self, tensors: Sequence[Any], adapters: Sequence[Any]) -> None:
        self._tensors, self._adapters = tensors, adapters
        self.device: Device = adapters[0].device(tensors[0])
        for tensor, adapter in zip(tensors, adapters, strict=True):
            index = adapter.device(tensor).index
            if index != self.device.index:
                raise DeviceError(
                    f"tensors of this list lie on {self.device.kind}:{self.device.index} and on {self.device.kind}:{index}: "
                    "each rank uses one GPU. Move them there; start more ranks to use more GPUs."
                )
        current = self.device.current()
        with self.device.on(current):
            self.natives: list[Any] = [a.to_device(tensor) for tensor, a in zip(tensors, adapters, strict=True)]
        self.ready: Any = current.record()

    def touch(self) -> None:
        """Tell the framework that the tensors have been overwritten."""
        for tensor, adapter in zip(self._tensors, self._adapters, strict=True):
            adapter.touch(tensor)

    def receive(self, done: Any, result: Any) -> Any:
        """Return the caller's result, and let the caller's stream wait for it. The caller's thread calls this.

        Args:
            done: An event that happens when the results have their values.
            result: A tensor of the device, or lists or pairs of tensors.
        """
        stream = self.device.current()
        stream.wait(done)
        return self._deliver(result, self._tensors[0], self._adapters[0], stream)

    def _deliver(self, result: Any, like: Any, adapter: Any, stream: Any) -> Any:
        if isinstance(result, list | tuple):
            several = len(result) == len(self._tensors) and isinstance(result, list)
            likes = zip(self._tensors, self._adapters, strict=True) if several else [(like, adapter)] * len(result)
            return type(result)(self._deliver(each, *kin, stream) for each, kin in zip(result, likes, strict=True))
        if any(result is tensor for tensor in self._tensors):
            return result
        self.device.keep(result, stream)
        return adapter.from_device(result, like)


def on_device(operations: Sequence[Any], collectives: GroupCollectives) -> list[Any]:
    """Run operations of one class and one device kind together, and return a result for each."""
    kind = operations[0].device_kind
    inputs: list[DeviceInputs] = [
        operation.device_inputs for operation in operations if operation.device_inputs is not None
    ]
    channel = collectives.on_device(kind, inputs[0].device if inputs else None)
    stream = channel.stream
    for each in inputs:
        stream.wait(each.ready)
    with channel.device.on(stream):
        make = type(operations[0]).run_on_device if channel.direct else None
        results: list[Any] = (
            type(operations[0]).run_on_host(operations, collectives)
            if make is None
            else make(operations, collectives, channel)
        )
        for each in inputs:
            for native in each.natives:
                each.device.keep(native, stream)  # the caller's memory must stay until `stream` has used it
            each.natives = []
    if make is not None:
        for operation in operations:
            if operation.device_inputs is not None and operation.inplace:
                operation.device_inputs.touch()
    done = stream.record()
    for operation in operations:
        if operation.device_inputs is not None:
            operation.hand_over = functools.partial(operation.device_inputs.receive, done)
    return results


def agree(collectives: Collectives, problem: Exception | None) -> None:
    """Return if all ranks can go on; else raise on all ranks. All ranks call this.

    Args:
        collectives: The collectives of the group on host memory.
        problem: The error that keeps this rank from going on; None if there is none.

    Raises:
        DeviceError: A rank has a problem. All ranks raise the same text.
    """
    state = np.array([problem is not None], np.int64)
    collectives.allreduce(state, ReduceOp.MAX)
    if not state[0]:
        return

    def error(problems: dict[int, str]) -> DeviceError:
        lines = [f"  rank {rank}: {text}" for rank, text in problems.items()]
        return DeviceError("a rank cannot take part in an operation on GPU tensors:\n" + "\n".join(lines))

    text = "" if problem is None else f"{type(problem).__name__}: {str(problem) or 'no reason given'}"
    Together(range(collectives.size), functools.partial(allgather_text, collectives)).raise_if(text, error)
