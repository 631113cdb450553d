"""Memory for gradients that a framework has in memory of its own, found again by what lies in it.

A tape is made anew for each step, and a function may be traced again on one rank only; so the memory belongs to the world, and
whoever has gradients of the same layout uses the same::

    group.exchanges ─▶ Registry of a process set ─▶ Buckets of a layout ─▶ Reducer ─▶ result buffers, lent to the framework

The framework has the gradients of a step in memory of its own: the part that this rank sums is read there. The sums are written
to memory that all ranks of the host share, and that TensorFlow then holds without a copy (see `hvdlite.gradients.bucket`). It
writes to no memory that it has not allocated itself (TF_NewTensor makes buffers that do not own their memory, which kernels do
not reuse for their outputs), so one rank's clipping leaves the gradients of the others alone. Who serves a framework that does
write copies the results.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from hvdlite.adapter.advice import Advice
from hvdlite.adapter.identity import Identity, follow
from hvdlite.api import allgather_object, broadcast, broadcast_object, global_process_set, world
from hvdlite.gradients.header import Header
from hvdlite.gradients.reducer import Reducer
from hvdlite.gradients.shared_reducers import stand_in
from hvdlite.process_set import ProcessSet
from hvdlite.protocols import Array, ReduceOp, TensorInfo
from hvdlite.tensors.numpy_adapter import dtype_of
from hvdlite.tensors.reduction import reduction
from hvdlite.tensors.registry import adapter_for
from hvdlite.world import World

ROOMS = 3
"""How many steps' gradients may be held without a copy. A framework lets go of one step's while the next is exchanged; and a
loop may look at the last step's while it makes the next."""

LAYOUTS = 16
"""How many are kept; the one that was not used for longest is given up. A program has two or three."""

MEMORIES = 256
"""How much small knowledge is kept; the oldest goes first, on all ranks alike."""

T = TypeVar("T")


class Buckets:
    """The exchange of gradients of one layout. Every rank makes one, at the same point. As `hvdlite.protocols.Exchange` says.

    Args:
        here: The world.
        infos: Dtype and shape of each gradient.
        op: Average or Sum.
        process_set: The ranks that take part; all if None.

    Raises:
        MismatchError: The ranks have different layouts. Raised on all of them.
    """

    def __init__(self, here: World, infos: Sequence[TensorInfo], op: ReduceOp, process_set: ProcessSet | None) -> None:
        self._here = here
        self._infos = infos
        self._op = op
        self._process_set = process_set
        self._group = here.group(process_set)
        self._reducer: Reducer = self._group.reducers.shared.get(
            infos, op, self._group.reducers.plan._replace(lend=ROOMS)
        )
        kernels = [reduction(info.dtype, ReduceOp.SUM) for info in infos]
        self._storage = [kernel.storage for kernel in kernels]
        self._dtypes = [dtype_of(info) for info in infos]
        # Halves are widened by torch where it is loaded, which dislikes memory that is read-only: those are copied.
        self._parts = [
            self._reducer.bucket_of(index).ownership.part_of(index) if kernel.exact else (0, 0)
            for index, kernel in enumerate(kernels)
        ]
        self._group.add(self)

    @property
    def last(self) -> Hashable:
        """A name of the last exchange, which is the same on all ranks."""
        return tuple(self._infos), self._op, self._reducer.exchanges

    @property
    def joined(self) -> bool:
        """Whether some rank had run out of data in the last exchange."""
        return self._reducer.joined > 0

    def exchange(
        self,
        gradients: Sequence[Array | None],
        said: Header = Header(),  # noqa: B008  # it cannot change
    ) -> list[Array | None]:
        """The gradients of all ranks.

        Args:
            gradients: Like the layout; None if this rank has none. They are only read.
            said: As for `Reducer.exchange`.

        Returns:
            For each an array that nobody changes, or None if no rank has a gradient.

        Raises:
            Postponed, HvdliteError: As `Reducer.exchange`.
        """
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

    def release(self) -> None:
        """Nothing: see `close`."""

    def catch_up(self, last: int) -> None:
        """Nothing: this is only memory. Optimizers catch up by way of the registry."""

    def somebody_has_joined(self) -> bool:
        """Whether a rank has run out of data. Every rank calls this that has not."""
        self._reducer.exchange([False] * len(self._infos))
        return self.joined

    def close(self) -> None:
        """Release the memory, on every rank. The framework may still hold results."""
        self._group.remove(self)
        self._group.reducers.release(self._reducer)


class Registry:
    """The buckets of a process set on one rank, and what else there is one of. As `hvdlite.group.RebindableExchange`
    says.

    All ranks have the same: buckets are made by all at once, and which of them was not used for longest is told by the
    exchanges, which all ranks make in the same order. A trace tells nothing, as it may be one rank's alone.
    """

    def __init__(self, here: World, process_set: ProcessSet | None) -> None:
        self._here = here
        self._process_set = process_set
        self._buckets: dict[Hashable, Buckets] = {}
        self._channels = 0
        self._tables: dict[Hashable, set[int]] = {}
        self._known: dict[Hashable, tuple[str | None, str]] = {}
        self._advice: dict[Hashable, Advice] = {}
        self._optimizers: weakref.WeakSet[Identity] = weakref.WeakSet()
        self.layouts: dict[int, Any] = {}
        """What the ranks have agreed to exchange, by the number of the `Identity`; the same on all ranks."""
        self._group = here.group(process_set)
        self._group.add(self)

    @classmethod
    def of(cls, here: World, process_set: ProcessSet | None) -> Registry:
        """The one of these ranks.

        Raises:
            ArgumentError: The set is not in effect, or this rank is not in it.
        """
        for exchange in here.group(process_set).exchanges:
            if isinstance(exchange, cls):
                return exchange
        return cls(here, process_set)

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that take part."""
        return global_process_set if self._process_set is None else self._process_set

    def leave(self) -> None:
        """Hold nothing of the world any more: it has ended."""
        self._buckets.clear()

    def rebind(self) -> None:
        """Have another registry in the present world: a rank may call `join` there before it has any gradient."""
        Registry.of(world("init()"), self._process_set)

    def buckets(self, infos: Sequence[TensorInfo], op: ReduceOp) -> Buckets:
        """Those of a layout. Every rank calls this if they are not there."""
        found = self._buckets.get((tuple(infos), op))
        if found is None:
            found = self._make(infos, op)
            # A rank that has joined does not know which was not used for longest.
            if len(self._buckets) > LAYOUTS and not found.somebody_has_joined():
                self._close_oldest()
        return found

    def _make(self, infos: Sequence[TensorInfo], op: ReduceOp) -> Buckets:
        made = self._buckets[tuple(infos), op] = Buckets(self._here, infos, op, self._process_set)
        return made

    def _close_oldest(self) -> None:
        while len(self._buckets) > LAYOUTS:
            self._buckets.pop(next(iter(self._buckets))).close()

    def use(self, infos: Sequence[TensorInfo], op: ReduceOp) -> Buckets:
        """As `buckets`, for an exchange that all ranks make now."""
        found = self.buckets(infos, op)
        key = (tuple(infos), op)
        self._buckets[key] = self._buckets.pop(key)
        return found

    def own_buckets(self, infos: Sequence[TensorInfo], op: ReduceOp) -> Buckets:
        """New ones, for the caller alone, which are kept as long as the world. Every rank calls this."""
        return Buckets(self._here, infos, op, self._process_set)

    def new_channel(self) -> str:
        """A name for exchanges that go on while others do. Every rank calls this."""
        self._channels += 1
        return f"exchange {self._channels}"

    def tables(self, key: Hashable) -> set[int]:
        """Of a list of sources, those whose gradients travel as rows. To be changed by all ranks at once."""
        return _remember(self._tables, key, set())

    def advice(self, key: Hashable) -> Advice:
        """The advice for the sources under a key."""
        return _remember(self._advice, key, Advice(self._here.config.advice))

    def known(self, key: Hashable) -> tuple[str | None, str] | None:
        """What `learn` was told of this, on this rank or (the first is None then) on others; None if it was not."""
        return self._known.get(key)

    def learn(self, key: Hashable, own: str, union: str) -> None:
        """Keep what gradients this rank has, and what the ranks have together. Every rank that has data calls this."""
        _remember(self._known, key, (own, union))

    def add(self, identity: Identity) -> None:
        """Let the variables of an optimizer be broadcast by `catch_up`. The optimizer keeps `identity` alive."""
        identity.enter(self._here)
        self._optimizers.add(identity)

    def stand_in(self) -> None:
        """Nothing: the buckets are in the world's list, too."""

    dropped = False
    """It is there as long as the process set."""

    memory_only = False

    @property
    def passes(self) -> Mapping[Hashable, int]:
        """Of each optimizer that has variables, by its first exchange; by its number where it has made none yet."""
        found = {each.first or each.number: each.optimizer for each in self._optimizers}
        made = {key: optimizer.hvdlite_passes() for key, optimizer in found.items() if optimizer is not None}
        return {key: passes for key, passes in made.items() if passes is not None}

    def keep(self) -> object:
        """Itself: it is never dropped."""
        return self

    def release(self) -> None:
        """Nothing: see `Buckets.close`."""

    def catch_up(self, last: int) -> None:
        """Take what the ranks have told each other, and the variables of the optimizers, from the rank that joined last."""
        for infos, op in list(self._group.reducers.shared.late):
            self._make(infos, op)
        root = self._group.ranks.index(last)
        firsts = {each.first: each.number for each in self._optimizers if each.first is not None}
        known, tables, self.layouts, firsts = broadcast_object(
            (self._known, self._tables, self.layouts, firsts), root, process_set=self._process_set
        )
        if follow(self._here, self._optimizers, firsts):
            self._known.clear()  # by numbers that are others' now
        for key, (_, union) in known.items():
            self._known.setdefault(key, (None, union))
        for key, rows in tables.items():
            self._tables.setdefault(key, set()).update(rows)  # exchanges keep these very sets
        # Who has joined has not seen which buckets the others used.
        for key in sorted(self._buckets, key=lambda key: self._group.exchanges.index(self._buckets[key])):
            self._buckets[key] = self._buckets.pop(key)
        self._close_oldest()
        found = {identity.number: identity.optimizer for identity in self._optimizers}
        # Each rank forgets optimizers when it pleases; where a function failed while it was traced, they have no values.
        variables = {
            number: each.hvdlite_variables()
            for number, each in found.items()
            if each is not None and each.hvdlite_passes() is not None
        }
        about = {number: [adapter_for(v).info(v) for v in each] for number, each in variables.items()}
        everybody = allgather_object(about, process_set=self._process_set)
        for number, what in sorted(about.items()):
            if what and all(other.get(number) == what for other in everybody):
                broadcast(variables[number], root, inplace=True, process_set=self._process_set)


def _remember(memory: dict[Hashable, T], key: Hashable, value: T) -> T:
    """What is known under a key; `value` from now on if nothing is."""
    found = memory.setdefault(key, value)
    if len(memory) > MEMORIES:
        del memory[next(iter(memory))]
    return found
