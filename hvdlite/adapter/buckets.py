"""The exchange of gradients of one layout, found again by what lies in it: in host memory, and on a device.

The framework has the gradients of a step in memory of its own: the part that this rank sums is read there. The sums are
written to memory that all ranks of the host share, and that the framework then holds without a copy (see
`hvdlite.gradients.bucket`); on a device, to flat memory of which it gets views.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hvdlite.errors import HvdliteError
from hvdlite.gradients.device.announced import AnnouncedReducer
from hvdlite.gradients.header import Header
from hvdlite.gradients.reducer import Reducer
from hvdlite.gradients.shared_reducers import stand_in
from hvdlite.process_set import ProcessSet
from hvdlite.protocols import Array, Device, ReduceOp, TensorInfo
from hvdlite.tensors.numpy_adapter import dtype_of
from hvdlite.tensors.reduction import reduction
from hvdlite.world import World

ROOMS = 3
"""How many steps' gradients may be held without a copy. A framework lets go of one step's while the next is exchanged; and a
loop may look at the last step's while it makes the next."""


class Buckets(abc.ABC):
    """The exchange of gradients of one layout. Every rank makes one, at the same point. As `hvdlite.protocols.Exchange` says.

    Args:
        here: The world.
        infos: Dtype and shape of each gradient.
        op: Average or Sum.
        process_set: The ranks that take part; all if None.
        kind: `Device.kind` of where the gradients are; empty for host memory.

    Raises:
        MismatchError: The ranks have different layouts. Raised on all of them.
    """

    def __init__(
        self, here: World, infos: Sequence[TensorInfo], op: ReduceOp, process_set: ProcessSet | None, kind: str = ""
    ) -> None:
        self._infos, self._op, self._kind = infos, op, kind
        self._group = here.group(process_set)
        reducers = self._group.reducers
        self._reducer: Reducer = reducers.shared.get(infos, op, reducers.plan._replace(lend=ROOMS), kind)
        self._group.add(self)

    @property
    def last(self) -> Hashable:
        """A name of the last exchange, which is the same on all ranks."""
        return tuple(self._infos), self._op, self._kind, self._reducer.exchanges

    @property
    def joined(self) -> bool:
        """Whether some rank had run out of data in the last exchange."""
        return self._reducer.joined > 0

    @abc.abstractmethod
    def exchange(self, gradients: Sequence[Any], said: Header = Header(), device: Device | None = None) -> list[Any]:  # noqa: B008  # it cannot change
        """The gradients of all ranks.

        Args:
            gradients: Like the layout; None if this rank has none. They are only read. Arrays, or tensors of `device`.
            said: As for `Reducer.exchange`.
            device: This rank's; None in host memory.

        Returns:
            For each what nobody changes, or None if no rank has a gradient.

        Raises:
            Postponed, HvdliteError: As `Reducer.exchange`.
        """

    def stand_in(self) -> None:
        """Take part in the exchanges of the others with nothing, until all ranks have joined."""
        stand_in(self._reducer)

    dropped = False
    """A traced function may use it at any time."""

    memory_only = True
    passes: Mapping[Hashable, int] = MappingProxyType({})

    def keep(self) -> object:
        """Itself: it is never dropped."""
        return self

    def release(self) -> None:  # noqa: B027  # there is nothing to do
        """Nothing: see `close`."""

    def catch_up(self, last: int) -> None:  # noqa: B027  # there is nothing to do
        """Nothing: this is only memory. Optimizers catch up by way of the registry."""

    def somebody_has_joined(self) -> bool:
        """Whether a rank has run out of data. Every rank calls this that has not."""
        self._reducer.exchange([False] * len(self._infos))
        return self.joined

    def close(self) -> None:
        """Release the memory, on every rank. The framework may still hold results."""
        self._group.remove(self)
        self._group.reducers.release(self._reducer)


class HostBuckets(Buckets):
    """In host memory: gradients and results are arrays.

    Args:
        here, infos, op, process_set: As for `Buckets`.
    """

    def __init__(self, here: World, infos: Sequence[TensorInfo], op: ReduceOp, process_set: ProcessSet | None) -> None:
        super().__init__(here, infos, op, process_set)
        kernels = [reduction(info.dtype, ReduceOp.SUM) for info in infos]
        self._storage = [kernel.storage for kernel in kernels]
        self._dtypes = [dtype_of(info) for info in infos]
        # Halves are widened by torch where it is loaded, which dislikes memory that is read-only: those are copied.
        self._parts = [
            self._reducer.bucket_of(index).ownership.part_of(index) if kernel.exact else (0, 0)
            for index, kernel in enumerate(kernels)
        ]

    def exchange(
        self,
        gradients: Sequence[Array | None],
        said: Header = Header(),  # noqa: B008  # it cannot change
        device: Device | None = None,
    ) -> list[Array | None]:
        used = [gradient is not None for gradient in gradients]
        try:
            for index, gradient in enumerate(gradients):
                if gradient is not None:
                    self._show(index, gradient)
            anywhere = self._reducer.exchange(used, said)
        finally:
            for index, (start, stop) in enumerate(self._parts):
                if start < stop:
                    self._reducer.bucket_of(index).place(index, None)  # the gradients are the framework's again
        return [self._result(index) if there else None for index, there in enumerate(anywhere)]

    def _show(self, index: int, gradient: Array) -> None:
        """Copy what other ranks read of a gradient; the rest is summed where it is."""
        flat = gradient.reshape(-1).view(self._storage[index])
        memory = self._reducer.memory_of(index)
        start, stop = self._parts[index]
        if start == stop:
            memory[:] = flat
            return
        memory[:start] = flat[:start]
        memory[stop:] = flat[stop:]
        self._reducer.bucket_of(index).place(index, flat[start:stop])

    def _result(self, index: int) -> Array:
        result = self._reducer.result_of(index)
        if not self._reducer.is_lent(index):
            result = result.copy()
        result.flags.writeable = False
        shaped: Array = result.view(self._dtypes[index]).reshape(self._infos[index].shape)
        return shaped


class DeviceBuckets(Buckets):
    """On a device: gradients and results are tensors of it.

    Args:
        here, infos, op, process_set, kind: As for `Buckets`.
    """

    def exchange(
        self,
        gradients: Sequence[Any],
        said: Header = Header(),  # noqa: B008  # it cannot change
        device: Device | None = None,
    ) -> list[Any]:
        assert isinstance(self._reducer, AnnouncedReducer)
        if device is None:
            raise HvdliteError(f"gradients on {self._kind} are exchanged by a rank that names no device.")
        return self._reducer.combine(gradients, said, device)
