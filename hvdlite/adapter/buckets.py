"""`Buckets`: the exchange of gradients of one layout, in host memory and on a device.

The gradients of a step lie in the framework's own memory, where this rank reads the part of them that it sums. It writes the
sums to memory that all ranks of the host share, and the framework then holds that memory without a copy (see
`hvdlite.gradients.bucket`). On a device, the sums are written to flat memory, and the framework gets views of it.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hvdlite.errors import HvdliteError
from hvdlite.gradients.device.announced import AnnouncedReducer
from hvdlite.gradients.header import Header
from hvdlite.gradients.reducer import Reducer
from hvdlite.gradients.reducers import Reducers
from hvdlite.gradients.shared_reducers import Layout, stand_in
from hvdlite.protocols import Array, Device, ReduceOp
from hvdlite.ranks.process_set import ProcessSet
from hvdlite.runtime.world import World
from hvdlite.tensors.numpy_adapter import dtype_of
from hvdlite.tensors.reduction import reduction

ROOMS = 3
"""The number of steps whose results the framework may hold without a copy. A framework releases the results of one step while
the next step is exchanged, and a training loop may still read the results of the last step while it computes the next."""


class Buckets(abc.ABC):
    """An `hvdlite.protocols.Exchange` of gradients of one layout. Every rank makes one at the same point of its program.

    Args:
        here: The world.
        layout: What the gradients of all ranks have in common.
        process_set: The ranks that participate; all if None.

    Raises:
        MismatchError: The ranks have different layouts. Raised on all ranks.
    """

    def __init__(self, here: World, layout: Layout, process_set: ProcessSet | None) -> None:
        self._layout, self._infos = layout, layout.infos
        self._group = here.group(process_set)
        self._reducer: Reducer = self._make_reducer(self._group.reducers, layout)
        self._group.add(self)
        self._exchanging = threading.Lock()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Return a context manager for an exchange.

        Raises:
            HvdliteError: Another thread of this rank makes one.
        """
        if not self._exchanging.acquire(blocking=False):
            raise HvdliteError(
                "two threads of this rank exchange gradients of equal shapes at the same time, and the ranks cannot tell "
                "which belong together: train one model after the other, or give each thread a process set of its own "
                "(process_set=hvd.new_group(range(hvd.size())))."
            )
        try:
            yield
        finally:
            self._exchanging.release()

    def _make_reducer(self, reducers: Reducers, layout: Layout) -> Reducer:
        # An aggregator overwrites the gradients, so results do not lie apart from them and are copied.
        plan = reducers.plan if layout.aggregator else reducers.plan._replace(lend=ROOMS)
        return reducers.shared.get(layout, plan)

    @property
    def last(self) -> Hashable:
        """A key of the last exchange, which is the same on all ranks, and which no other exchange of the group has."""
        return self._reducer.number, self._reducer.exchanges

    @property
    def joined(self) -> bool:
        """Whether some rank had run out of data in the last exchange."""
        return self._reducer.joined > 0

    @abc.abstractmethod
    def exchange(self, gradients: Sequence[Any], said: Header = Header(), device: Device | None = None) -> list[Any]:  # noqa: B008  # it cannot change
        """Return the gradients of all ranks.

        Args:
            gradients: An array, or a tensor of `device`, for each gradient of the layout; None if this rank does not have it.
                The gradients are only read.
            said: See `Reducer.exchange`.
            device: This rank's device; None for host memory.

        Returns:
            For each gradient an array or tensor that nobody changes; None if no rank has the gradient.

        Raises:
            Postponed, HvdliteError: See `Reducer.exchange`.
        """

    def stand_in(self) -> None:
        """Take part in the exchanges of the other ranks without data, until all ranks have joined."""
        stand_in(self._reducer)

    dropped = False
    """Never dropped, because a traced function may use the object at any time."""

    memory_only = True
    passes: Mapping[Hashable, int] = MappingProxyType({})

    def keep(self) -> object:
        """Return the object itself, which is never dropped."""
        return self

    def release(self) -> None:  # noqa: B027  # there is nothing to do
        """Do nothing; see `close`."""

    def catch_up(self, last: int) -> None:  # noqa: B027  # there is nothing to do
        """Do nothing: buckets are only memory. The registry lets the optimizers catch up."""

    def somebody_has_joined(self) -> bool:
        """Return whether a rank has run out of data. Every rank that still has data calls this."""
        self._reducer.exchange([False] * len(self._infos))
        return self.joined

    def close(self) -> None:
        """Release the memory. Every rank calls this. The framework may still hold results."""
        self._group.remove(self)
        self._group.reducers.release(self._reducer)


class HostBuckets(Buckets):
    """Buckets in host memory: gradients and results are arrays.

    Args:
        here, layout, process_set: See `Buckets`.
    """

    def __init__(self, here: World, layout: Layout, process_set: ProcessSet | None) -> None:
        super().__init__(here, layout, process_set)
        kernels = [reduction(info.dtype, ReduceOp.SUM) for info in layout.infos]
        self._storage = [kernel.storage for kernel in kernels]
        self._dtypes = [dtype_of(info) for info in layout.infos]
        # Halves are always copied: torch, if it is loaded, widens them, and it does not accept read-only memory. An aggregator
        # sees all gradients in flat memory.
        copied = [not kernel.exact or layout.aggregator > 0 for kernel in kernels]
        self._parts = [
            (0, 0) if copy else self._reducer.bucket_of(index).ownership.part_of(index)
            for index, copy in enumerate(copied)
        ]

    def exchange(
        self,
        gradients: Sequence[Array | None],
        said: Header = Header(),  # noqa: B008  # it cannot change
        device: Device | None = None,
    ) -> list[Array | None]:
        used = [gradient is not None for gradient in gradients]
        with self._alone():
            try:
                for index, gradient in enumerate(gradients):
                    if gradient is not None:
                        self._show(index, gradient)
                anywhere = self._reducer.exchange(used, said)
            finally:
                for index, (start, stop) in enumerate(self._parts):
                    if start < stop:
                        self._reducer.bucket_of(index).place(index, None)  # the gradients belong to the framework again
            return [self._result(index) if there else None for index, there in enumerate(anywhere)]

    def _show(self, index: int, gradient: Array) -> None:
        """Copy the elements of a gradient that other ranks read. The other elements are summed where they are."""
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
    """Buckets on a device: gradients and results are tensors of the device.

    Args:
        here, layout, process_set: See `Buckets`.
    """

    def exchange(
        self,
        gradients: Sequence[Any],
        said: Header = Header(),  # noqa: B008  # it cannot change
        device: Device | None = None,
    ) -> list[Any]:
        assert isinstance(self._reducer, AnnouncedReducer)
        if device is None:
            raise HvdliteError(f"gradients on {self._layout.device} are exchanged by a rank that names no device.")
        with self._alone():
            return self._reducer.combine(gradients, said, device)
