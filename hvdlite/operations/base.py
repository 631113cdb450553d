"""The base classes of all operations: a signature that the ranks must agree on, and a way to run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from hvdlite.comm.gpu.collectives import DeviceCollectives
from hvdlite.comm.gpu.groups import GroupCollectives
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.operations.absent import AbsentTensor
from hvdlite.operations.on_device import DeviceInputs, on_device
from hvdlite.protocols import Array, Device, TensorInfo
from hvdlite.tensors.registry import adapter_for, device_kind_of

Signature = tuple[str, tuple[tuple[str, tuple[int | None, ...]], ...], tuple[tuple[str, Any], ...]]
"""What must be equal on all ranks: the kind, the dtype and shape of each tensor, and the other arguments by name.

None in a shape stands for a length that may differ from rank to rank. Signatures are plain tuples, because they travel often.
"""

SHARED_BUCKETS = "shared gradient buckets"
"""The kind of the operation in which the ranks make buckets for gradients: see `hvdlite.gradients.shared_reducers`."""
_TENSORS_SHOWN = 4
_MILESTONE = "milestone"


def describe(signature: Signature, start: int = 0) -> str:
    """Return a signature in words, for errors. The text shows only a few of many tensors, from number `start` on."""
    kind, tensors, arguments = signature
    shown = [f"{dtype}({', '.join('*' if n is None else str(n) for n in shape)})" for dtype, shape in tensors]
    if len(shown) > _TENSORS_SHOWN:
        shown = [f"{len(shown)} tensors, from number {start}: {', '.join(shown[start : start + _TENSORS_SHOWN])}, …"]
    return f"{kind}({', '.join([*shown, *(f'{name}={value}' for name, value in arguments)])})"


class Operation:
    """An operation that all ranks of a group run together.

    ``class Name(Operation, kind="name")`` says that ranks which have joined take part in it, by `of_absent`.

    Attributes:
        kind: The first entry of the signature.
        signature: What must be equal on all ranks.
        fusion_key: Operations with equal keys (not None) may be fused: `run_together` runs them as one.
        nbytes: The number of bytes that travel. It limits how many operations are fused.
        single: True if the caller gave one tensor and gets one result; False for lists.
        device_kind: The `Device.kind` of all tensors, the same on all ranks; None for host memory.
        device: The GPU of the tensors; None for host memory, and for a rank that has joined.
        hand_over: A function that turns the result of `run` into the caller's, in the caller's thread; None if there is
            nothing to do.
        at_once: True if the operation may run without a negotiation when all ranks call it at about the same time. See
            `hvdlite.operations.negotiation.express`.
        is_small: True if the operation makes at most one call of its collectives, an ``allreduce`` or ``broadcast`` of at most
            `SHOWN_BYTES`, and changes nothing before it.
    """

    fusion_key: Hashable = None
    nbytes: int = 0
    single: bool = False
    device_kind: str | None = None
    device: Device | None = None
    hand_over: Callable[[Any], Any] | None = None
    at_once: bool = False
    is_small: bool = False
    kind: str = ""
    signature: Signature

    def __init_subclass__(cls, kind: str = "") -> None:
        if kind:
            cls.kind = kind
            _OF_KIND[kind] = cls

    @classmethod
    def of_absent(cls, absent: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Operation:
        """Return the operation of a rank that has joined: it adds no values, and drops what it receives.

        Args:
            absent: Tensors without values, as the signature of the other ranks has them; lengths that may differ are 0.
            arguments: The arguments of that signature, by name, but for the device.
            rank: The rank of this process in the group.
            size: The number of ranks in the group.
        """
        raise NotImplementedError

    def run(self, collectives: GroupCollectives) -> Any:
        """Run the operation and return its result. Every rank of the group calls this at the same point of its sequence."""
        raise NotImplementedError

    def outcome(self, result: Any) -> Any:
        """Return the caller's result, given what `run` returned."""
        return result[0] if self.single else result

    @classmethod
    def run_together(cls, operations: Sequence[Any], collectives: GroupCollectives) -> list[Any]:
        """Run operations of this class that have the same fusion key. Return one result for each."""
        return [operation.run(collectives) for operation in operations]


_OF_KIND: dict[str, type[Operation]] = {}
"""The operations in which ranks take part that have joined."""


def operation_for_absent(signature: Signature, rank: int, size: int) -> Operation:
    """Make the operation of a rank that has joined.

    Args:
        signature: The signature of the operation on the other ranks. `why_absent_refused` must return None for it.
        rank: The rank of this process in the group.
        size: The number of ranks in the group.
    """
    kind, tensors, given = signature
    arguments = dict(given)
    device_kind = arguments.pop("device", None)
    # If a length may differ from rank to rank, this rank has no rows.
    absent = [AbsentTensor(dtype, tuple(length or 0 for length in shape), device_kind) for dtype, shape in tensors]
    return _OF_KIND[kind].of_absent(absent, arguments, rank, size)


def why_absent_refused(signature: Signature, joined: Sequence[int]) -> str | None:
    """Return the reason why an operation cannot run while the ranks `joined` are absent; None if it can."""
    kind, _, arguments = signature
    if kind not in _OF_KIND and kind != SHARED_BUCKETS:
        return "it needs every rank"
    root = dict(arguments).get("root_rank")
    return f"rank {root} is its root" if root in joined else None


class TensorOperation(Operation):
    """An operation on tensors.

    Args:
        given: The tensor of this rank, or a list of tensors.
        inplace: True if the results overwrite the tensors.

    Attributes:
        device_inputs: The tensors of this rank on a GPU; None in host memory, and for a rank that has joined.

    Raises:
        UnsupportedTensorError: An entry is no tensor, holds no numbers, or cannot be overwritten; or the tensors lie on
            several devices.
    """

    def __init__(self, given: Any, inplace: bool = False) -> None:
        self.single = not isinstance(given, (list, tuple))
        self.tensors: list[Any] = [given] if self.single else list(given)
        self.inplace = inplace
        self.adapters: list[Any] = []
        self.infos: list[TensorInfo] = []
        kinds = []
        for tensor in self.tensors:  # often one: this loop is on the way of a small blocking call
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
        self.at_once = self.device_kind is None
        self.device_inputs: DeviceInputs | None = None
        if self.device_kind is not None and not isinstance(self.tensors[0], AbsentTensor):
            self.device_inputs = DeviceInputs(self.tensors, self.adapters)
            self.device = self.device_inputs.device

    @property
    def where(self) -> tuple[tuple[str, Any], ...]:
        """Return the entry of the signature for the device of the tensors; nothing for host memory."""
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
        """Do what `run_together` does, on NumPy arrays. Tensors that lie on a GPU are copied to the host and back."""
        return [operation.exchange(collectives) for operation in operations]

    @classmethod
    def run_on_device(
        cls, operations: Sequence[Any], collectives: GroupCollectives, channel: DeviceCollectives
    ) -> list[Any]:
        """Do what `run_together` does, on the GPU. A result is a tensor of `Device`, or None for an `AbsentTensor`."""
        return [operation.exchange_on_device(collectives, channel) for operation in operations]

    def exchange(self, collectives: GroupCollectives) -> Any:
        """Run this one operation on NumPy arrays, for `run_on_host`."""
        raise NotImplementedError

    def exchange_on_device(self, collectives: GroupCollectives, channel: DeviceCollectives) -> Any:
        """Run this one operation on the GPU, for `run_on_device`."""
        raise NotImplementedError


class OperationTensor:
    """One tensor of an operation, with its adapter, its dtype, and whether the result overwrites it."""

    __slots__ = ("adapter", "dtype", "inplace", "tensor")

    def __init__(self, tensor: Any, adapter: Any, dtype: str, inplace: bool) -> None:
        self.tensor, self.adapter, self.dtype, self.inplace = tensor, adapter, dtype, inplace

    @property
    def is_absent(self) -> bool:
        """True if this rank has joined and adds no values."""
        return isinstance(self.tensor, AbsentTensor)

    def deliver(self, array: Array) -> Any:
        """Return the caller's result: the tensor itself, overwritten with `array`, or a new tensor."""
        if self.inplace:
            self.adapter.assign(self.tensor, array)
            return self.tensor
        return self.adapter.from_array(array, self.dtype, self.tensor)


def check_root(root: int, size: int) -> int:
    """Return `root` as an int.

    Raises:
        ArgumentError: `root` is not a rank of the group.
    """
    if isinstance(root, bool) or not isinstance(root, int | np.integer) or not 0 <= root < size:
        raise ArgumentError(f"root_rank={root!r}: expected a rank of the group, 0 to {size - 1}.")
    return int(root)


class Barrier(Operation, kind="barrier"):
    """Wait until every rank has submitted its barrier. The agreement to run is the barrier, so `run` does nothing."""

    at_once = is_small = True

    def __init__(self) -> None:
        self.signature = (self.kind, (), ())

    @classmethod
    def of_absent(cls, absent: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Barrier:
        return Barrier()

    def run(self, collectives: GroupCollectives) -> None:
        return None


class Milestone(Barrier):
    """A barrier that waits for ranks that have joined too, and that these may submit.

    Threads that prepare data use it, because they run on while the program's thread joins.
    """

    at_once = is_small = False
    kind = _MILESTONE


def needs_every_rank(signature: Signature) -> bool:
    """Return whether ranks that have joined are waited for too."""
    return signature[0] == _MILESTONE


class Join(Operation):
    """The operation that a rank waits for after `join`. It never runs: the controller completes it."""

    def __init__(self) -> None:
        self.signature = ("join", (), ())


class Agreement(Operation):
    """Call a local function at the same point of every rank's sequence, after all ranks have asked for the same.

    Communicators are made in this way. If the ranks ask in different orders, this raises an error; MPI would hang.
    """

    def __init__(
        self, kind: str, arguments: Sequence[tuple[str, Any]], action: Callable[[GroupCollectives], Any]
    ) -> None:
        self.signature = (kind, (), tuple(arguments))
        self.action = action

    def run(self, collectives: GroupCollectives) -> Any:
        return self.action(collectives)
