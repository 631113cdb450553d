"""Named operations on tensors that lie on a GPU.

::

    caller's stream    … makes x │ event      │ goes on …                     │ waits for the event, uses the result
                                 ▼ submit                                     ▲ handle.wait()
    our stream                     waits for it │ pack, collective, unpack │ event
                                                ▲ when all ranks have submitted theirs, from whichever thread drives the engine

The host never waits for the GPU. Before the collective all ranks say by a message of a few bytes that they have found the
memory that they need: a rank that has not would leave the others in the collective for ever.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.algorithms.gather_bytes import allgather_bytes
from hvdlite.errors import DeviceError
from hvdlite.gpu.groups import GroupCollectives
from hvdlite.protocols import Collectives, Device, ReduceOp


class DeviceInputs:
    """A rank's part of an operation on a GPU.

    Args:
        tensors: The caller's, at least one, all on one device.
        adapters: Of each.

    Attributes:
        device: Where they lie.
        natives: They as tensors of the device, which share their memory.
        ready: Happens when the caller's stream has made their values.
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
        """The tensors have been overwritten."""
        for tensor, adapter in zip(self._tensors, self._adapters, strict=True):
            adapter.touch(tensor)

    def receive(self, done: Any, result: Any) -> Any:
        """Called in the caller's thread: what he does next comes after what was done for him.

        Args:
            done: Happens when the results have their values.
            result: Of the device: a tensor, or lists or pairs of them.
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
    """Run `TensorOperation`s of one class and one device kind together.

    Returns:
        A result for each.
    """
    kind = operations[0].device_kind
    places: list[DeviceInputs] = [operation.place for operation in operations if operation.place is not None]
    channel = collectives.on_device(kind, places[0].device if places else None)
    stream = channel.stream
    for place in places:
        stream.wait(place.ready)
    with channel.device.on(stream):
        make = type(operations[0]).run_on_device if channel.direct else None
        results: list[Any] = (
            type(operations[0]).run_on_host(operations, collectives)
            if make is None
            else make(operations, collectives, channel)
        )
        for place in places:
            for native in place.natives:
                place.device.keep(native, stream)  # whose memory it is: that of others, which the channel may not know
            place.natives = []
    if make is not None:
        for operation in operations:
            if operation.place is not None and operation.inplace:
                operation.place.touch()
    done = stream.record()
    for operation in operations:
        if operation.place is not None:
            operation.hand_over = functools.partial(operation.place.receive, done)
    return results


def agree(collectives: Collectives, problem: Exception | None) -> None:
    """Go on if all ranks can. All ranks call this.

    Args:
        collectives: The group.
        problem: Why this rank cannot; None if it can.

    Raises:
        DeviceError: Some rank cannot. The same text on all ranks.
    """
    state = np.array([problem is not None], np.int64)
    collectives.allreduce(state, ReduceOp.MAX)
    if not state[0]:
        return
    text = "" if problem is None else f"{type(problem).__name__}: {str(problem) or 'no reason given'}"
    texts = allgather_bytes(collectives, np.frombuffer(text.encode(), np.uint8))
    lines = [f"  rank {rank}: {data.tobytes().decode()}" for rank, data in enumerate(texts) if data.size]
    raise DeviceError("a rank cannot take part in an operation on GPU tensors:\n" + "\n".join(lines))
