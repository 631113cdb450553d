"""What every operation is: a signature that the ranks must agree on, and a way to run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.gpu.collectives import DeviceCollectives
from hvdlite.gpu.groups import GroupCollectives
from hvdlite.operations.absent import AbsentTensor
from hvdlite.operations.on_device import DeviceInputs, on_device
from hvdlite.protocols import Array, Device, TensorInfo
from hvdlite.tensors.registry import adapter_for, device_kind_of

Signature = tuple[str, tuple[tuple[str, tuple[int | None, ...]], ...], tuple[tuple[str, Any], ...]]
"""What must be the same on all ranks: kind, (dtype, shape) of each tensor, other arguments by name.

None in a shape stands for a length that may differ from rank to rank. Plain tuples, because they travel often.
"""

_TENSORS_SHOWN = 4


def describe(signature: Signature, start: int = 0) -> str:
    """The signature in words, as errors show it; of a long list of tensors, some from number `start` on."""
    kind, tensors, arguments = signature
    shown = [f"{dtype}({', '.join('*' if n is None else str(n) for n in shape)})" for dtype, shape in tensors]
    if len(shown) > _TENSORS_SHOWN:
        shown = [f"{len(shown)} tensors, from number {start}: {', '.join(shown[start : start + _TENSORS_SHOWN])}, …"]
    return f"{kind}({', '.join([*shown, *(f'{name}={value}' for name, value in arguments)])})"


class Operation:
    """Something that all ranks of a group do together.

    Attributes:
        signature: What must agree between the ranks.
        fusion_key: Operations with equal keys (not None) may run as one, by `run_together`.
        nbytes: Bytes that travel; decides how many operations share one exchange.
        single: The caller gave one tensor and gets one result, not a list.
        device_kind: `Device.kind` of where all its tensors lie, the same on all ranks; None for host memory.
        device: The GPU that they lie on; None for host memory, and for a rank that has joined.
        hand_over: What makes the caller's result of `outcome`, in his thread; None if that is it already.
    """

    fusion_key: Hashable = None
    nbytes: int = 0
    single: bool = False
    device_kind: str | None = None
    device: Device | None = None
    hand_over: Callable[[Any], Any] | None = None
    signature: Signature

    def run(self, collectives: GroupCollectives) -> Any:
        """Do it; every rank of the group does so at the same point of its sequence. Returns the caller's result."""
        raise NotImplementedError

    def outcome(self, result: Any) -> Any:
        """What the caller gets for what `run` returned."""
        return result[0] if self.single else result

    @classmethod
    def run_together(cls, operations: Sequence[Any], collectives: GroupCollectives) -> list[Any]:
        """Run operations of this class that have the same fusion key; one result each."""
        return [operation.run(collectives) for operation in operations]


class TensorOperation(Operation):
    """An operation on tensors.

    Args:
        given: This rank's tensor, or a list of them.
        inplace: The results overwrite the tensors.

    Attributes:
        place: Its own part of what is done on a GPU; None in host memory, and for a rank that has joined.

    Raises:
        UnsupportedTensorError: One of them is no tensor, has no numbers in it, or cannot be overwritten; or they do not lie
            together.
    """

    def __init__(self, given: Any, inplace: bool = False) -> None:
        self.single = not isinstance(given, (list, tuple))
        self.tensors: list[Any] = [given] if self.single else list(given)
        self.inplace = inplace
        self.adapters: list[Any] = []
        self.infos: list[TensorInfo] = []
        kinds = []
        for tensor in self.tensors:  # often one, and then the fewer steps the better
            adapter = adapter_for(tensor)
            self.adapters.append(adapter)
            self.infos.append(adapter.info(tensor))
            kinds.append(device_kind_of(tensor, adapter))
            if inplace:
                adapter.check_writable(tensor)
        self.device_kind = kinds[0] if kinds else None
        if len(kinds) > 1 and len(set(kinds)) > 1:
            raise UnsupportedTensorError(
                "some tensors of this list are in host memory and others on a GPU: exchange each kind by a call of its own, or "
                "move them to one place."
            )
        self.place: DeviceInputs | None = None
        if self.device_kind is not None and not isinstance(self.tensors[0], AbsentTensor):
            self.place = DeviceInputs(self.tensors, self.adapters)
            self.device = self.place.device

    @property
    def where(self) -> tuple[tuple[str, Any], ...]:
        """What the signature says of where the tensors lie: nothing of host memory."""
        return () if self.device_kind is None else (("device", self.device_kind),)

    def run(self, collectives: GroupCollectives) -> Any:
        return self.run_together([self], collectives)[0]

    @classmethod
    def run_together(cls, operations: Sequence[Any], collectives: GroupCollectives) -> list[Any]:
        if operations[0].device_kind is None:
            return cls.run_on_host(operations, collectives)
        return on_device(operations, collectives)

    @classmethod
    def run_on_host(cls, operations: Sequence[Any], collectives: GroupCollectives) -> list[Any]:
        """As `run_together`, by way of NumPy arrays: of tensors that lie on a GPU these are copies."""
        return [operation.exchange(collectives) for operation in operations]

    @classmethod
    def run_on_device(
        cls, operations: Sequence[Any], collectives: GroupCollectives, channel: DeviceCollectives
    ) -> list[Any]:
        """As `run_together`, where the tensors lie; the results are tensors of `Device`, and None for an `AbsentTensor`."""
        return [operation.exchange_on_device(collectives, channel) for operation in operations]

    def exchange(self, collectives: GroupCollectives) -> Any:
        """What `run_on_host` does for one operation."""
        raise NotImplementedError

    def exchange_on_device(self, collectives: GroupCollectives, channel: DeviceCollectives) -> Any:
        """What `run_on_device` does for one operation."""
        raise NotImplementedError


class Part:
    """One tensor of an exchange."""

    __slots__ = ("adapter", "dtype", "inplace", "tensor")

    def __init__(self, tensor: Any, adapter: Any, dtype: str, inplace: bool) -> None:
        self.tensor, self.adapter, self.dtype, self.inplace = tensor, adapter, dtype, inplace

    @property
    def is_nothing(self) -> bool:
        """This rank has joined and adds no values."""
        return isinstance(self.tensor, AbsentTensor)

    def deliver(self, array: Array) -> Any:
        """The result for the caller: the tensor itself, overwritten, or a new one."""
        if self.inplace:
            self.adapter.assign(self.tensor, array)
            return self.tensor
        return self.adapter.from_array(array, self.dtype, self.tensor)


def check_root(root: int, size: int) -> int:
    """The root as an int.

    Raises:
        ArgumentError: It is not a rank of the group.
    """
    if isinstance(root, bool) or not isinstance(root, int | np.integer) or not 0 <= root < size:
        raise ArgumentError(f"root_rank={root!r}: expected a rank of the group, 0 to {size - 1}.")
    return int(root)


class Barrier(Operation):
    """Wait for everybody. Agreeing that all are here is all there is to do."""

    def __init__(self) -> None:
        self.signature = ("barrier", (), ())

    def run(self, collectives: GroupCollectives) -> None:
        return None


class Join(Operation):
    """What a rank that has joined waits for; it runs nowhere."""

    def __init__(self) -> None:
        self.signature = ("join", (), ())


class Agreement(Operation):
    """Do something local at the same point of every rank's sequence, once all ranks have asked for the very same.

    How communicators are made: an order that differs between the ranks is an error here and not a hang inside MPI.
    """

    def __init__(
        self, kind: str, arguments: Sequence[tuple[str, Any]], action: Callable[[GroupCollectives], Any]
    ) -> None:
        self.signature = (kind, (), tuple(arguments))
        self.action = action

    def run(self, collectives: GroupCollectives) -> Any:
        return self.action(collectives)
