"""Gradients of one list of sources, as arrays of any framework: what an exchange does when it runs.

Dense ones go through buckets. The first rank that has rows of a table in place of a whole gradient says so in the header of
that exchange, which is put off; from then on rows of that table travel as named operations, whatever each rank has::

    own gradients ─▶ all that are dense, and no table's ─▶ buckets ─┬─▶ gradients of all ranks
                  └▶ rows of tables                    ─▶ gathered ─┘

Dense gradients that lie on a device stay there: they are then tensors of a `Device` in place of arrays.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hvdlite.adapter.advice import Advice, Values, say, see
from hvdlite.adapter.buckets import Buckets
from hvdlite.adapter.gradient_memory import Registry
from hvdlite.adapter.identity import Identity, check_rates
from hvdlite.api import Adasum, Average, Sum, allgather, allgather_object, allreduce, world
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from hvdlite.gradients.header import Header, digest
from hvdlite.gradients.reducer import Postponed
from hvdlite.process_set import ProcessSet
from hvdlite.protocols import Array, Device, ReduceOp, TensorInfo
from hvdlite.tensors.numpy_adapter import dtype_of

T = TypeVar("T")

UNKNOWN = -1
"""A dimension that is known only when a function runs."""

Gradient = Any
"""An array, or a tensor of a `Device`; `Rows`; or None."""


class Rows(NamedTuple):
    """Some rows of a table.

    Attributes:
        indices: Which; int64 of shape (n,). A row that is there more than once is the sum of all.
        values: Of shape (n, …), like rows of the table.
    """

    indices: Array
    values: Array


class NewLayout(Exception):
    """Some rank has gradients of another layout. Raised on all ranks."""


class ArraySync:
    """Exchanges gradients of one list of sources. Every rank makes one.

    A traced function keeps this object for longer than a world lasts. So it looks up the world and the memory in each exchange.

    Args:
        infos: Dtype and shape of each gradient; a dimension may be `UNKNOWN`.
        op: Average, Sum, or Adasum.
        process_set: The ranks that take part; all if None.
        channel: If not empty, exchanges of other channels may go on at the same time.
        sparse: Some rank may have rows.
        identity: The optimizer whose gradients these are; None if they are no optimizer's.
    """

    def __init__(
        self,
        infos: Sequence[TensorInfo],
        op: ReduceOp,
        process_set: ProcessSet | None,
        channel: str = "",
        sparse: bool = True,
        identity: Identity | None = None,
    ) -> None:
        self._infos = infos
        self._op = op
        self._process_set = process_set
        self._channel = channel
        self._sparse = sparse
        self._identity = identity
        self._registry: weakref.ref[Registry] | None = None
        self._own_buckets: dict[tuple[tuple[TensorInfo, ...], str], Buckets] = {}
        self._tables: set[int] = set()
        self._advice: Advice | None = None
        self.joined = False
        """Some rank had run out of data in the last exchange."""
        self.enter()

    def enter(self) -> Registry:
        """The memory of the world that this is called in, and what is known there of these gradients.

        Raises:
            NotInitializedError: Before `init`, or after `shutdown`.
            HvdliteError: This belongs to a graph for a session, which was built before `shutdown`.
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
        # Those of a session are its own: other exchanges change the others at any time.
        if self._sparse and not self._channel:
            self._tables = registry.tables((tuple(self._infos), self._op))
        if self._identity is not None:
            registry.add(self._identity)
        self._advice = None if self._channel else registry.advice((self.number, tuple(self._infos)))
        return registry

    @property
    def number(self) -> int:
        """The number of the optimizer whose gradients these are; 0 if they are no optimizer's."""
        return 0 if self._identity is None else self._identity.number

    def prepare(self, tables: Sequence[int]) -> None:
        """Have memory, if shapes are known. Every rank calls this; `tables` are those of which some rank has rows.

        Raises:
            MismatchError: The ranks have different sources. Raised on all of them.
        """
        registry = self.enter()
        self._tables.update(tables)
        infos = [info for i, info in enumerate(self._infos) if i not in self._tables]
        if infos and self._op is not Adasum and all(UNKNOWN not in info.shape for info in infos):
            self._buckets(registry, infos, "", in_use=False)

    def exchange(
        self,
        own: Sequence[Gradient],
        weight: float,
        values: Values | None = None,
        refuse: bool = False,
        device: Device | None = None,
    ) -> list[Gradient]:
        """The gradients of all ranks. Every rank calls this.

        Args:
            own: This rank's, like the sources.
            weight: Share of this rank in an average.
            values: Gives the tensors whose gradients these are, to compare them once; nothing is compared if None.
            refuse: This rank has gradients that do not fit, and exchanges nothing. (Not with Adasum.)
            device: Where the dense ones lie; None for host memory. (Not with Adasum.)

        Returns:
            For each an array (or tensor of `device`), or `Rows`, or None if no rank has one.

        Raises:
            NewLayout: Some rank refuses. Raised on all of them, and nothing is changed.
            MismatchError: The learning rates of the ranks differ. Raised on all of them, and nothing is changed.
            HvdliteError: The weights of all ranks are 0. Raised on all of them.
        """
        registry = self.enter()
        if self._op is Adasum:
            return self._adasum(own)
        infos = [_known(info, gradient) for info, gradient in zip(self._infos, own, strict=True)]
        looks = values is not None and self._advice is not None and self._advice.is_due()
        rates = self._identity.rates() if self._identity is not None else ()
        while True:
            dense = [i for i in range(len(own)) if i not in self._tables]
            new = [i for i in dense if isinstance(own[i], Rows)]
            try:
                found = self._exchange_dense(
                    registry,
                    [infos[i] for i in dense],
                    [None if i in new else own[i] for i in dense],
                    Header(weight, news=bool(new) or looks or refuse, state=digest(rates)),
                    device,
                )
                break
            except Postponed as stop:
                if not stop.told.news:
                    self._refuse_rates(rates)
                self._hear_news(new, looks, refuse, own, values)
                looks = False
        results: dict[int, Gradient] = dict(zip(dense, found, strict=True))
        tables = sorted(self._tables)
        rows = [own[i] if device is None else _in_host_memory(own[i], device) for i in tables]
        results.update(zip(tables, self._exchange_rows(tables, rows, weight), strict=True))
        return [results[i] for i in range(len(own))]

    def _hear_news(
        self, new: list[int], looks: bool, refuse: bool, own: Sequence[Gradient], values: Values | None
    ) -> None:
        """Some rank has rows of a new table, or wants to look for what goes wrong quietly; all ranks tell what they have."""
        everybody = self.gather((new, looks, refuse))
        if any(refused for *_, refused in everybody):
            raise NewLayout
        self._tables.update(i for tables, *_ in everybody for i in tables)
        if any(look for _, look, _ in everybody):
            seen = self.gather(see(values or (lambda: None), own))
            if world("the exchange of gradients").engine(self._process_set).rank == 0:
                say(seen)

    def _refuse_rates(self, rates: tuple[float, ...]) -> None:
        """Some rank has other learning rates. Every rank that has data calls this."""
        here = world("the exchange of gradients")
        own = here.ranks(self._process_set)[here.engine(self._process_set).rank], rates
        check_rates("in this step", dict(self.gather(own)))

    def gather_by_source(self, values: Sequence[T]) -> list[tuple[T, ...]]:
        """For each source, what the ranks that have data say of its gradients.

        Raises:
            MismatchError: The ranks have different numbers of sources. Raised on all of them.
        """
        everybody = self.gather(values)
        numbers = [len(each) for each in everybody]
        if len(set(numbers)) > 1:
            raise MismatchError(f"the ranks exchange gradients of different numbers of sources: {numbers}.")
        return list(zip(*everybody, strict=True))

    def gather(self, value: Any) -> list[Any]:
        """What the ranks that have data say of their gradients."""
        name = f"what gradients there are{self._channel and ' in '}{self._channel}"
        everybody = allgather_object(value, name, process_set=self._process_set)
        return [each for each in everybody if each is not None]

    def _buckets(self, registry: Registry, infos: Sequence[TensorInfo], kind: str, in_use: bool) -> Buckets:
        if not self._channel:
            return (registry.use if in_use else registry.buckets)(infos, self._op, kind)
        key = tuple(infos), kind
        if key not in self._own_buckets:
            self._own_buckets[key] = registry.own_buckets(infos, self._op, kind)
        return self._own_buckets[key]

    def _exchange_dense(
        self,
        registry: Registry,
        infos: Sequence[TensorInfo],
        own: Sequence[Gradient],
        said: Header,
        device: Device | None,
    ) -> list[Gradient]:
        if not infos:
            return []
        buckets = self._buckets(registry, infos, "" if device is None else device.kind, in_use=True)
        found = buckets.exchange(own, said, device)
        self.joined = buckets.joined
        if self._identity is not None and self._identity.first is None:
            self._identity.first = buckets.last
        return found

    def _exchange_rows(self, tables: Sequence[int], own: Sequence[Gradient], weight: float) -> list[Rows | None]:
        if not tables:
            return []
        name = f"rows{self._channel and ' of '}{self._channel}"
        about = np.array([weight, *(gradient is not None for gradient in own)], np.float64)
        counts = allreduce(about, Sum, name, process_set=self._process_set)
        total, anywhere = float(counts[0]), counts[1:] > 0
        factor = 1.0
        if self._op is Average:
            if total <= 0 and anywhere.any():
                raise HvdliteError("the weights of all ranks add up to 0, so their sparse gradients have no average.")
            factor = weight / total if total else 0.0
        mine: list[Array] = []
        for i, gradient in zip(tables, own, strict=True):
            indices, values = as_rows(self._infos[i], gradient)
            mine += [indices, values if factor == 1.0 else values * np.asarray(factor, values.dtype)]
        # Two operations: those of one have equal numbers of rows.
        gathered = iter(allgather(mine, f"all {name}", process_set=self._process_set))
        pairs = zip(gathered, gathered, strict=True)
        return [Rows(*pair) if there else None for pair, there in zip(pairs, anywhere, strict=True)]

    def _adasum(self, own: Sequence[Gradient]) -> list[Array | None]:
        there = self.gather_by_source([gradient is not None for gradient in own])
        chosen = [i for i, ranks in enumerate(there) if any(ranks)]
        if not chosen:
            return [None] * len(own)
        mine = [zeros(self._infos[i]) if own[i] is None else own[i] for i in chosen]
        name = f"gradients{self._channel and ' of '}{self._channel}"
        combined = allreduce(mine, Adasum, name, process_set=self._process_set)
        found = dict(zip(chosen, combined, strict=True))
        return [found.get(i) for i in range(len(own))]


def zeros(info: TensorInfo) -> Array:
    """A gradient of zeros, for a source whose shape is known."""
    info = _known(info, None)
    return np.zeros(info.shape, dtype_of(info))


def as_rows(info: TensorInfo, gradient: Gradient) -> Rows:
    """A gradient of a table like `info`, whatever it is."""
    if isinstance(gradient, Rows):
        return gradient
    if gradient is None:
        return Rows(np.zeros(0, np.int64), np.zeros((0, *info.shape[1:]), dtype_of(info)))
    return Rows(np.arange(len(gradient)), gradient)


def as_array(info: TensorInfo, gradient: Gradient) -> Array:
    """A gradient of a source like `info`, whatever it is. Of rows that are there more than once, the sum."""
    if isinstance(gradient, Rows):
        whole = zeros(info)
        np.add.at(whole, gradient.indices, gradient.values)
        return whole
    array: Array = zeros(info) if gradient is None else gradient
    return array


def _in_host_memory(gradient: Gradient, device: Device) -> Gradient:
    """A gradient that is no tensor of `device`: of a table, which other ranks have rows of."""
    if gradient is None or isinstance(gradient, Rows):
        return gradient
    array = device.to_host(device.flat(gradient)).reshape(tuple(gradient.shape))
    return array.view(dtype_of(TensorInfo(device.dtype(gradient), array.shape)))


def _known(info: TensorInfo, gradient: Gradient) -> TensorInfo:
    """`info` with the shape that the gradient has now."""
    if UNKNOWN not in info.shape:
        return info
    if gradient is None or isinstance(gradient, Rows):
        raise ArgumentError(
            f"a source of {info.dtype} whose shape is not known has no dense gradient here: use tensor.set_shape()."
        )
    return TensorInfo(info.dtype, tuple(gradient.shape))
