"""`Registry`: keeps the buckets of each layout of gradients, for frameworks that have gradients in memory of their own.

A program makes a new tape for each step, and a function may be traced again on a single rank. So the memory belongs to the
world, and all gradients of equal layout use the same buckets::

    group.exchanges ─▶ Registry of a process set ─▶ Buckets of a layout ─▶ Reducer ─▶ result buffers, lent to the framework

TensorFlow holds results without a copy. It writes only to memory that it has allocated itself (TF_NewTensor makes buffers that
do not own their memory, and kernels do not reuse such buffers for their outputs). So if one rank clips its gradients, the
gradients of the other ranks stay unchanged. An adapter copies the results if its framework writes to such memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

from hvdlite.adapter.advice import Advice
from hvdlite.adapter.agreement import all_together
from hvdlite.adapter.buckets import Buckets, DeviceBuckets, HostBuckets
from hvdlite.adapter.few_bytes.aggregating import OptimizerAggregator
from hvdlite.adapter.identity import Identity, members
from hvdlite.adapter.joining.follow import follow, tell
from hvdlite.adapter.options import ExchangeOptions
from hvdlite.api import allgather_object, broadcast, broadcast_object, global_process_set, world
from hvdlite.gradients.aggregator import Aggregator, name_of
from hvdlite.gradients.shared_reducers import Layout
from hvdlite.ranks.process_set import ProcessSet
from hvdlite.runtime.world import World

LAYOUTS = 16
"""The number of layouts whose buckets are kept. The least recently used are released. A program has two or three layouts."""

MEMORIES = 256
"""The number of entries that each small dict of a registry keeps. All ranks drop the oldest entry first."""

AGGREGATORS = 16
"""The number of aggregators that a registry keeps. One that is used after that is entered again."""

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Registry:
    """The buckets of a process set on one rank, and its other shared state: an `hvdlite.runtime.group.RebindableExchange`.

    All ranks have the same buckets: they make them together, and the exchanges, which all ranks make in the same order, decide
    which buckets are the least recently used. A trace does not count as a use, because a single rank may trace.
    """

    def __init__(self, here: World, process_set: ProcessSet | None) -> None:
        self._here = here
        self._process_set = process_set
        self._buckets: dict[Layout, Buckets] = {}
        self._aggregating: dict[int, OptimizerAggregator] = {}
        self._entered = self._together = 0
        self._channels = 0
        self._tables: dict[Hashable, set[int]] = {}
        self._known: dict[tuple[Hashable, int], tuple[str | None, str]] = {}
        self._advice: dict[Hashable, Advice] = {}
        self.layouts: dict[int, Any] = {}
        """The layouts that the ranks have agreed on, by the number of the `Identity`; the same on all ranks."""
        self.behind: list[int] = []
        """The ranks that have missed steps in the last join, with an optimizer that had no variables there."""
        self._group = here.group(process_set)
        self._group.add(self)
        self._group.reducers.aggregator_of = self._aggregator_of

    @classmethod
    def of(cls, here: World, process_set: ProcessSet | None) -> Registry:
        """Return the registry of a process set. The first call makes it.

        Raises:
            ArgumentError: The set is not in effect, or this rank is not in it.
        """
        for exchange in here.group(process_set).exchanges:
            if isinstance(exchange, cls):
                return exchange
        return cls(here, process_set)

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that participate."""
        return global_process_set if self._process_set is None else self._process_set

    def leave(self) -> None:
        """Drop the buckets, because their world has ended."""
        self._buckets.clear()

    def rebind(self) -> None:
        """Make another registry in the present world, where a rank may call `join` before it has any gradient."""
        registry = Registry.of(world("init()"), self._process_set)
        for each in self._aggregating.values():
            registry._enter(each)

    def aggregating(self, aggregator: Aggregator) -> OptimizerAggregator:
        """Return what belongs to an aggregator here. Every rank calls this, with its own aggregators in the same order.

        Raises:
            MismatchError: The ranks have different aggregators. Raised on all ranks.
            HvdliteError: The aggregator is new, and a rank has joined. Raised on all ranks that have not.
        """
        found = next((each for each in self._aggregating.values() if each.aggregator is aggregator), None)
        return self._enter(OptimizerAggregator(aggregator)) if found is None else found

    def _enter(self, new: OptimizerAggregator) -> OptimizerAggregator:
        lines = [f"aggregator={name_of(new.aggregator)}", f"aggregators that were made before it: {self._entered}"]
        all_together("aggregator=", self._process_set).check_same(lines, "what combines their gradients")
        self._entered += 1
        new.number = self._entered
        return _remember(self._aggregating, new.number, new, AGGREGATORS)

    def _aggregator_of(self, layout: Layout) -> Aggregator | None:
        return self._aggregating[layout.aggregator].of(layout) if layout.aggregator else None

    def buckets(self, layout: Layout) -> Buckets:
        """Return the buckets of a layout. Every rank calls this if the buckets do not exist yet."""
        found = self._buckets.get(layout)
        if found is None:
            found = self._make(layout)
            # A rank that has joined does not know which buckets are the least recently used.
            if len(self._buckets) > LAYOUTS and not found.somebody_has_joined():
                self._close_oldest()
        return found

    def _make(self, layout: Layout) -> Buckets:
        made = self._buckets[layout] = self.own_buckets(layout)
        return made

    def _close_oldest(self) -> None:
        while len(self._buckets) > LAYOUTS:
            self._buckets.pop(next(iter(self._buckets))).close()

    def use(self, layout: Layout) -> Buckets:
        """Return the buckets of a layout for an exchange that all ranks make now. See `buckets`."""
        found = self.buckets(layout)
        self._buckets[layout] = self._buckets.pop(layout)
        return found

    def own_buckets(self, layout: Layout) -> Buckets:
        """Make buckets for the caller alone, which are kept as long as the world exists. Every rank calls this."""
        return (DeviceBuckets if layout.device else HostBuckets)(self._here, layout, self._process_set)

    def new_channel(self) -> str:
        """Return a new name for exchanges that run at the same time as others. Every rank calls this."""
        self._channels += 1
        return f"exchange {self._channels}"

    def tables(self, key: Hashable) -> set[int]:
        """Return the positions of the sources whose gradients travel as rows. Callers change this set on all ranks at once."""
        return _remember(self._tables, key, set())

    def advice(self, key: Hashable) -> Advice:
        """Return the `Advice` for the sources of a key."""
        return _remember(self._advice, key, Advice(self._here.config.advice))

    def known(self, key: tuple[Hashable, int]) -> tuple[str | None, str] | None:
        """Return the arguments of `learn` for a key; None if no rank has called it.

        The first element is None if only other ranks have called `learn`, and this rank has caught up with them.
        """
        return self._known.get(key)

    def learn(self, key: tuple[Hashable, int], own: str, union: str) -> None:
        """Keep which gradients there are. Every rank that has data calls this.

        Args:
            key: The key for `known`.
            own: The kinds of the gradients that this rank has.
            union: The kinds of the gradients that the ranks have together.
        """
        _remember(self._known, key, (own, union))

    def add(self, identity: Identity) -> None:
        """Let `catch_up` broadcast the variables of an optimizer. The optimizer keeps `identity` alive."""
        identity.enter(self._group)

    def made_together(self, identity: Identity) -> None:
        """Note that all ranks make this optimizer now, as they have found out in a call that they made together."""
        identity.enter(self._group)
        self._together += 1
        identity.first = identity.first or f"made together, number {self._together}"

    def agree_on_layout(self, number: int, layout: Any) -> None:
        """Keep the layout that the ranks have agreed on for an optimizer, and forget those of optimizers that were dropped."""
        there = {each.number for each in members(self._group)}
        self.layouts = {each: known for each, known in self.layouts.items() if each in there} | {number: layout}

    def stand_in(self) -> None:
        """Do nothing: the group also has the buckets in its list, and the buckets take part themselves."""

    dropped = False
    """Never dropped: a registry lives as long as its process set is in effect."""

    memory_only = False

    @property
    def passes(self) -> Mapping[Hashable, int]:
        """The number of backward passes of each optimizer with variables, by its first exchange; by its number before that."""
        found = {each.first or each.number: each.optimizer for each in members(self._group)}
        made = {key: optimizer.hvdlite_passes() for key, optimizer in found.items() if optimizer is not None}
        return {key: passes for key, passes in made.items() if passes is not None}

    def keep(self) -> object:
        """Return the registry itself, which is never dropped."""
        return self

    def release(self) -> None:
        """Do nothing; see `Buckets.close`."""

    def catch_up(self, last: int) -> None:
        """Get the shared state, and the values of the optimizers' variables, from rank `last`. All ranks call this."""
        for layout in list(self._group.reducers.shared.late):
            self._make(layout)
        root = self._group.ranks.index(last)
        identities = members(self._group)
        # Each rank may drop an optimizer at any time.
        held = [(identity, identity.optimizer) for identity in identities]
        everybody = allgather_object(tell(self._group), process_set=self._process_set)
        followed = follow(self._group, identities, everybody, root)
        # The keys contain numbers, which may belong to other optimizers now.
        self._known = {
            (function, followed.numbers.get(number, 0)): value
            for (function, number), value in self._known.items()
            if not number or number in followed.numbers
        }
        known, tables, self.layouts = broadcast_object(
            (self._known, self._tables, self.layouts), root, process_set=self._process_set
        )
        for key, (_, union) in known.items():
            self._known.setdefault(key, (None, union))
        for sources, rows in tables.items():
            self._tables.setdefault(sources, set()).update(rows)  # exchanges hold references to these sets
        # A rank that had joined has not seen in which order the others used the buckets.
        for layout in sorted(self._buckets, key=lambda each: self._group.exchanges.index(self._buckets[each])):
            self._buckets[layout] = self._buckets.pop(layout)
        self._close_oldest()
        # If so, equal numbers mean the same optimizer, also before its first exchange.
        alike = len({tuple((each.number, each.infos) for each in own) for _, own in everybody}) == 1
        optimizers = {identity.number: optimizer for identity, optimizer in held}
        self.behind = []
        for number, told in followed.together.items():
            optimizer = optimizers[number]
            if told[root].infos and told[root].first is not None:
                self.behind += [
                    self._group.ranks[r] for r, each in enumerate(told) if not each.infos and self._group.missed[r]
                ]
            # Variables have no values if the trace that made them has failed.
            if optimizer is None or not told[root].infos or len({each.infos for each in told}) > 1:
                continue
            missed = len({each.passes for each in told}) > 1
            if missed and (told[root].first is not None or told[root].alone or alike):
                broadcast(optimizer.hvdlite_variables(), root, inplace=True, process_set=self._process_set)
                optimizer.hvdlite_settle([each.passes for each in told], root)
                if (rounds := optimizer.hvdlite_rounds()) is not None:
                    rounds.load(broadcast_object(rounds.state(), root, process_set=self._process_set))


def numbers_of(options: ExchangeOptions, sources: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the numbers by which an aggregator knows these sources; None without one. See `OptimizerAggregator.numbers_of`."""
    found = enter_aggregator(options)
    return None if found is None else found.numbers_of(sources)


def enter_aggregator(options: ExchangeOptions) -> OptimizerAggregator | None:
    """Return what belongs to the aggregator of an exchange, if there is one. See `Registry.aggregating`."""
    if options.aggregator is None:
        return None
    return Registry.of(world("the exchange of gradients"), options.process_set).aggregating(options.aggregator)


def _remember(memory: dict[K, T], key: K, value: T, limit: int = MEMORIES) -> T:
    """Return the value of a key, which is set to `value` if there is none. Drop the oldest entry if there are too many."""
    found = memory.setdefault(key, value)
    if len(memory) > limit:
        del memory[next(iter(memory))]
    return found
