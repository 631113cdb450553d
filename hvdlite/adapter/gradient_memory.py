"""Memory for gradients that a framework has in memory of its own, found again by what lies in it.

A tape is made anew for each step, and a function may be traced again on one rank only; so the memory belongs to the world, and
whoever has gradients of the same layout uses the same::

    group.exchanges ─▶ Registry of a process set ─▶ Buckets of a layout ─▶ Reducer ─▶ result buffers, lent to the framework

TensorFlow holds results without a copy. It writes to no memory that it has not allocated itself (TF_NewTensor makes buffers
that do not own their memory, which kernels do not reuse for their outputs), so one rank's clipping leaves the gradients of the
others alone. Who serves a framework that does write copies the results.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

from hvdlite.adapter.advice import Advice
from hvdlite.adapter.buckets import Buckets, DeviceBuckets, HostBuckets
from hvdlite.adapter.identity import Identity, follow
from hvdlite.api import allgather_object, broadcast, broadcast_object, global_process_set, world
from hvdlite.process_set import ProcessSet
from hvdlite.protocols import ReduceOp, TensorInfo
from hvdlite.tensors.registry import adapter_for
from hvdlite.world import World

LAYOUTS = 16
"""How many are kept; the one that was not used for longest is given up. A program has two or three."""

MEMORIES = 256
"""How much small knowledge is kept; the oldest goes first, on all ranks alike."""

T = TypeVar("T")


class Registry:
    """The buckets of a process set on one rank, and what else there is one of. As `hvdlite.group.RebindableExchange`
    says.

    All ranks have the same: buckets are made by all at once, and which of them was not used for longest is told by the
    exchanges, which all ranks make in the same order. A trace tells nothing, as it may be one rank's alone.
    """

    def __init__(self, here: World, process_set: ProcessSet | None) -> None:
        self._here = here
        self._process_set = process_set
        self._buckets: dict[tuple[tuple[TensorInfo, ...], ReduceOp, str], Buckets] = {}
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

    def buckets(self, infos: Sequence[TensorInfo], op: ReduceOp, kind: str = "") -> Buckets:
        """Those of a layout. Every rank calls this if they are not there.

        Args:
            infos, op, kind: As for `Buckets`.
        """
        found = self._buckets.get((tuple(infos), op, kind))
        if found is None:
            found = self._make(infos, op, kind)
            # A rank that has joined does not know which was not used for longest.
            if len(self._buckets) > LAYOUTS and not found.somebody_has_joined():
                self._close_oldest()
        return found

    def _make(self, infos: Sequence[TensorInfo], op: ReduceOp, kind: str) -> Buckets:
        made = self._buckets[tuple(infos), op, kind] = self.own_buckets(infos, op, kind)
        return made

    def _close_oldest(self) -> None:
        while len(self._buckets) > LAYOUTS:
            self._buckets.pop(next(iter(self._buckets))).close()

    def use(self, infos: Sequence[TensorInfo], op: ReduceOp, kind: str = "") -> Buckets:
        """As `buckets`, for an exchange that all ranks make now."""
        found = self.buckets(infos, op, kind)
        key = (tuple(infos), op, kind)
        self._buckets[key] = self._buckets.pop(key)
        return found

    def own_buckets(self, infos: Sequence[TensorInfo], op: ReduceOp, kind: str = "") -> Buckets:
        """New ones, for the caller alone, which are kept as long as the world. Every rank calls this."""
        if kind:
            return DeviceBuckets(self._here, infos, op, self._process_set, kind)
        return HostBuckets(self._here, infos, op, self._process_set)

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
        for layout in list(self._group.reducers.shared.late):
            self._make(*layout)
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
