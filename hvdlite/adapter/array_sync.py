"""`ArraySync`: the part of a gradient exchange that runs in each step, on arrays of any framework.

Dense gradients go through buckets. A source is a table if some rank has only some rows of its gradient. The first rank that
has such rows says so in the header of the exchange, and the exchange is postponed. From then on all ranks send rows of that
table by named operations, even if a rank has a dense gradient::

    own gradients ─┬▶ gradients of other sources ─▶ buckets ───┬─▶ gradients of all ranks
                   └▶ rows of tables             ─▶ allgather ─┘

Dense gradients that lie on a device stay there: they are then tensors of a `Device`, not arrays.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import numpy as np

from hvdlite.adapter.advice import Advice, Values, say, see
from hvdlite.adapter.buckets import Buckets
from hvdlite.adapter.gradient_memory import Registry
from hvdlite.adapter.identity import Identity, meet
from hvdlite.adapter.tables import TableRows, exchange_rows
from hvdlite.api import Adasum, allgather_object, allreduce, world
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from hvdlite.gradients.aggregator import Aggregator
from hvdlite.gradients.header import Header, digest
from hvdlite.gradients.reducer import Postponed
from hvdlite.gradients.shared_reducers import Layout
from hvdlite.protocols import Array, Device, ReduceOp, TensorInfo
from hvdlite.ranks.process_set import ProcessSet
from hvdlite.tensors.numpy_adapter import dtype_of

T = TypeVar("T")

UNKNOWN = -1
"""A dimension that is known only when a function runs."""

Gradient = Any
"""An array, a tensor of a `Device`, `TableRows`, or None."""


class NewLayout(Exception):
    """Raised on all ranks if some rank has gradients of another layout."""


class ArraySync:
    """Exchanges the gradients of one list of sources. Every rank makes one.

    A traced function may keep this object after its world has ended. So each exchange looks up the world and its buckets.

    Args:
        infos: Dtype and shape of each gradient; a dimension may be `UNKNOWN`.
        op: Average, Sum, or Adasum.
        process_set: The ranks that participate; all if None.
        channel: A name, or empty. If it is a name, exchanges of other channels may run at the same time.
        sparse: Whether some rank may have `TableRows`.
        identity: The identity of the optimizer whose gradients these are; None without an optimizer.
        aggregator: Combines the gradients; None for their (weighted) sum.
        numbers: The number by which the aggregator knows each source; the places of `infos` by default.
        kept: The places of tables whose rows of equal index stay apart. See `exchange_rows`.
    """

    def __init__(
        self,
        infos: Sequence[TensorInfo],
        op: ReduceOp,
        process_set: ProcessSet | None,
        channel: str = "",
        sparse: bool = True,
        identity: Identity | None = None,
        aggregator: Aggregator | None = None,
        numbers: Sequence[int] | None = None,
        kept: Collection[int] = (),
    ) -> None:
        self._infos = infos
        self._kept = kept
        self._aggregator = aggregator
        self._numbers = range(len(infos)) if numbers is None else numbers
        self._op = op
        self._process_set = process_set
        self._channel = channel
        self._sparse = sparse
        self._identity = identity
        self._registry: weakref.ref[Registry] | None = None
        self._own_buckets: dict[Layout, Buckets] = {}
        self._tables: set[int] = set()
        self._advice: Advice | None = None
        self.origin = ""
        """What else must be the same on all ranks in each exchange, in words."""
        self.joined = False
        """Whether some rank had run out of data in the last exchange."""
        self.enter()

    def enter(self) -> Registry:
        """Return the registry of the present world. The first call in a world gets tables and advice from that registry.

        Raises:
            NotInitializedError: `init` has not been called, or `shutdown` has been called since.
            HvdliteError: This exchange is in a graph for a session, and the graph was built before `shutdown` or before the
                process set was removed.
        """
        here = world("the exchange of gradients")
        registry = Registry.of(here, self._process_set)
        if self._registry is not None and self._registry() is registry:
            return registry
        if self._registry is not None and self._channel:
            raise HvdliteError(
                "this graph was built before hvdlite.shutdown(), or before its process set was removed, and its exchanges "
                "ended with that: build the graph, and its session, anew after init()."
            )
        self._registry = weakref.ref(registry)
        # A session has tables of its own, because other exchanges may change the shared tables at any time.
        if self._sparse and not self._channel:
            self._tables = registry.tables((tuple(self._infos), self._op))
        if self._identity is not None:
            registry.add(self._identity)
        self._advice = None if self._channel else registry.advice((self.number, tuple(self._infos)))
        return registry

    @property
    def number(self) -> int:
        """The number of the optimizer whose gradients these are; 0 without an optimizer."""
        return 0 if self._identity is None else self._identity.number

    def prepare(self, tables: Sequence[int]) -> None:
        """Make the buckets now if all shapes are known. Every rank calls this.

        Args:
            tables: The positions of the sources of which some rank has rows.

        Raises:
            MismatchError: The ranks have different sources. Raised on all ranks.
        """
        registry = self.enter()
        self._tables.update(tables)
        dense = [i for i in range(len(self._infos)) if i not in self._tables]
        infos = [self._infos[i] for i in dense]
        if infos and self._op is not Adasum and all(UNKNOWN not in info.shape for info in infos):
            self._buckets(registry, self._layout(registry, dense, infos), in_use=False)

    def exchange(
        self,
        own: Sequence[Gradient],
        weight: float,
        values: Values | None = None,
        refuse: bool = False,
        device: Device | None = None,
    ) -> list[Gradient]:
        """Return the gradients of all ranks. Every rank calls this.

        Args:
            own: This rank's gradient of each source.
            weight: The weight of this rank in an average.
            values: A function that returns the sources, which the ranks compare once; None to compare nothing.
            refuse: Whether this rank has gradients that do not fit, and so exchanges nothing. False for Adasum.
            device: The device of the dense gradients; None for host memory. None for Adasum.

        Returns:
            For each source an array (or a tensor of `device`) or `TableRows`; None if no rank has a gradient.

        Raises:
            NewLayout: Some rank refuses. Raised on all ranks; nothing is changed.
            MismatchError: The ranks have different learning rates, or exchange gradients of different optimizers. Raised on all
                ranks; nothing is changed.
            HvdliteError: The weights of all ranks are 0. Raised on all ranks.
        """
        registry = self.enter()
        if self._op is Adasum:
            there = map(any, self.gather_by_source([gradient is not None for gradient in own]))
            name = f"gradients{self._channel and ' of '}{self._channel}"
            return _adasum(self._infos, own, list(there), name, self._process_set)
        infos = [_known(info, gradient) for info, gradient in zip(self._infos, own, strict=True)]
        looks = values is not None and self._advice is not None and self._advice.is_due()
        rates, key = (self._identity.rates(), self._identity.key) if self._identity is not None else ((), None)
        while True:
            dense = [i for i in range(len(own)) if i not in self._tables]
            new = [i for i in dense if isinstance(own[i], TableRows)]
            try:
                found = self._exchange_dense(
                    registry,
                    self._layout(registry, dense, [infos[i] for i in dense], device),
                    [None if i in new else own[i] for i in dense],
                    Header(weight, news=bool(new) or looks or refuse, state=digest(rates, self.origin, key)),
                    device,
                )
                break
            except Postponed as stop:
                if stop.told.news:
                    self._hear_news(new, looks, refuse, own, values)
                    looks = False
                elif self._identity is None or not meet(self._identity, rates, self.gather, self._process_set):
                    self._refuse()
                else:
                    key, rates = self._identity.key, () if self._identity.apart else rates
        if rates and self._identity is not None:
            self._identity.may_differ = False  # they were the same
        results: dict[int, Gradient] = dict(zip(dense, found, strict=True))
        tables = sorted(self._tables)
        rows = [own[i] if device is None else _in_host_memory(own[i], device) for i in tables]
        kept = [place for place, i in enumerate(tables) if i in self._kept]
        name = f"rows{self._channel and ' of '}{self._channel}"
        table_infos = [self._infos[i] for i in tables]
        gathered = exchange_rows(table_infos, rows, weight, self._op, kept, name, self._process_set)
        results.update(zip(tables, gathered, strict=True))
        return [results[i] for i in range(len(own))]

    def _hear_news(
        self, new: list[int], looks: bool, refuse: bool, own: Sequence[Gradient], values: Values | None
    ) -> None:
        """Gather the news of all ranks after an exchange was postponed. Every rank that has data calls this.

        Args:
            new: The sources of which this rank has rows for the first time.
            looks: Whether this rank wants to compare.
            refuse, own, values: See `exchange`.

        Raises:
            NewLayout: Some rank refuses.
        """
        everybody = self.gather((new, looks, refuse))
        if any(refused for *_, refused in everybody):
            raise NewLayout
        self._tables.update(i for tables, *_ in everybody for i in tables)
        if any(look for _, look, _ in everybody):
            seen = self.gather(see(values or (lambda: None), own))
            if world("the exchange of gradients").engine(self._process_set).rank == 0:
                say(seen)

    def _refuse(self) -> None:
        """Raise an error on all ranks because the origins of their states differ. Every rank that has data calls this."""

    def gather_by_source(self, values: Sequence[T]) -> list[tuple[T, ...]]:
        """Return for each source the values of all ranks that have data.

        Args:
            values: A value of this rank for each source.

        Raises:
            MismatchError: The ranks have different numbers of sources. Raised on all ranks.
        """
        everybody = self.gather(values)
        numbers = [len(each) for each in everybody]
        if len(set(numbers)) > 1:
            raise MismatchError(f"the ranks exchange gradients of different numbers of sources: {numbers}.")
        return list(zip(*everybody, strict=True))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks that have data."""
        name = f"what gradients there are{self._channel and ' in '}{self._channel}"
        everybody = allgather_object(value, name, process_set=self._process_set)
        return [each for each in everybody if each is not None]

    def _layout(
        self, registry: Registry, dense: Sequence[int], infos: Sequence[TensorInfo], device: Device | None = None
    ) -> Layout:
        """Return what all ranks have in common in the exchange of the dense gradients, which have these places and `infos`."""
        kind = "" if device is None else device.kind
        if self._aggregator is None:
            return Layout(tuple(infos), self._op, kind)
        aggregating, numbers = registry.aggregating(self._aggregator), tuple(self._numbers[i] for i in dense)
        aggregating.check(numbers, infos)
        return Layout(tuple(infos), self._op, kind, aggregating.number, numbers)

    def _buckets(self, registry: Registry, layout: Layout, in_use: bool) -> Buckets:
        if not self._channel:
            return (registry.use if in_use else registry.buckets)(layout)
        if layout not in self._own_buckets:
            self._own_buckets[layout] = registry.own_buckets(layout)
        return self._own_buckets[layout]

    def _exchange_dense(
        self, registry: Registry, layout: Layout, own: Sequence[Gradient], said: Header, device: Device | None
    ) -> list[Gradient]:
        if not own:
            return []
        buckets = self._buckets(registry, layout, in_use=True)
        found = buckets.exchange(own, said, device)
        self.joined = buckets.joined
        if self._identity is not None and self._identity.first is None:
            self._identity.first = buckets.last
        return found


def _adasum(
    infos: Sequence[TensorInfo],
    own: Sequence[Gradient],
    there: Sequence[bool],
    name: str,
    process_set: ProcessSet | None,
) -> list[Array | None]:
    """Combine the gradients that are on some rank by Adasum. Every rank calls this."""
    chosen = [i for i, anywhere in enumerate(there) if anywhere]
    if not chosen:
        return [None] * len(own)
    mine = [zeros(infos[i]) if own[i] is None else own[i] for i in chosen]
    combined = allreduce(mine, Adasum, name, process_set=process_set)
    found = dict(zip(chosen, combined, strict=True))
    return [found.get(i) for i in range(len(own))]


def zeros(info: TensorInfo) -> Array:
    """Return a gradient of zeros for a source whose shape is known."""
    info = _known(info, None)
    return np.zeros(info.shape, dtype_of(info))


def as_array(info: TensorInfo, gradient: Gradient) -> Array:
    """Return any gradient of a source as an array; rows of equal index are summed. `info` is the source's dtype and shape."""
    if isinstance(gradient, TableRows):
        whole = zeros(info)
        np.add.at(whole, gradient.indices, gradient.values)
        return whole
    array: Array = zeros(info) if gradient is None else gradient
    return array


def _in_host_memory(gradient: Gradient, device: Device) -> Gradient:
    """Return the gradient of a table in host memory, where the ranks gather their rows. A dense gradient is copied there."""
    if gradient is None or isinstance(gradient, TableRows):
        return gradient
    array = device.to_host(device.flat(gradient)).reshape(tuple(gradient.shape))
    return array.view(dtype_of(TensorInfo(device.dtype(gradient), array.shape)))


def _known(info: TensorInfo, gradient: Gradient) -> TensorInfo:
    """Return `info`, with the shape of this step's gradient if a dimension is `UNKNOWN`.

    Raises:
        ArgumentError: A dimension is `UNKNOWN`, and this rank has no dense gradient.
    """
    if UNKNOWN not in info.shape:
        return info
    if gradient is None or isinstance(gradient, TableRows):
        raise ArgumentError(
            f"a source of {info.dtype} whose shape is not known has no dense gradient here: use tensor.set_shape()."
        )
    return TensorInfo(info.dtype, tuple(gradient.shape))
