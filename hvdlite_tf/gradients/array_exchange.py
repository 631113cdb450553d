"""Gradients of one list of sources, as arrays: what an exchange does when it runs.

Dense ones go through buckets. The first rank that has rows of a table in place of a whole gradient says so in the header of
that exchange, which is put off; from then on rows of that table travel as named operations, whatever each rank has::

    own gradients ─▶ all that are dense, and no table's ─▶ buckets ─┬─▶ gradients of all ranks
                  └▶ rows of tables                    ─▶ gathered ─┘
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

import hvdlite
from hvdlite import ProcessSet, ReduceOp
from hvdlite.api import world
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from hvdlite.gradients.header import Header, digest
from hvdlite.gradients.reducer import Postponed
from hvdlite.protocols import Array, TensorInfo
from hvdlite_tf.gradients.advice import Advice, say, see
from hvdlite_tf.gradients.gradient_memory import Buckets, Registry
from hvdlite_tf.gradients.identity import Identity
from hvdlite_tf.gradients.optimizer_parts import check_rates

T = TypeVar("T")

UNKNOWN = -1
"""A dimension that is known only when a function runs."""

Gradient = Any
"""An array, `Rows`, or None."""


class Rows(NamedTuple):
    """Some rows of a table.

    Attributes:
        indices: Which; int64 of shape (n,). A row that is there more than once is the sum of all.
        values: Of shape (n, …), like rows of the table.
    """

    indices: Array
    values: Array


class ArrayExchange:
    """Exchanges gradients of one list of sources. Every rank makes one.

    Args:
        registry: Has the memory.
        infos: Dtype and shape of each gradient; a dimension may be `UNKNOWN`.
        op: Average, Sum, or Adasum.
        process_set: The ranks that take part; all if None.
        channel: If not empty, exchanges of other channels may go on at the same time.
        sparse: Some rank may have rows.
        identity: Of the optimizer whose gradients these are.
    """

    def __init__(
        self,
        registry: Registry,
        infos: Sequence[TensorInfo],
        op: ReduceOp,
        process_set: ProcessSet | None,
        channel: str = "",
        sparse: bool = True,
        identity: Identity | None = None,
    ) -> None:
        self._registry = registry
        self._infos = infos
        self._op = op
        self._process_set = process_set
        self._channel = channel
        self._identity = identity
        self._own_buckets: dict[tuple[TensorInfo, ...], Buckets] = {}
        # Of a session, its own: other exchanges change them at any time.
        self._tables: set[int] = registry.tables((tuple(infos), op)) if sparse and not channel else set()
        self.joined = False
        """Some rank had run out of data in the last exchange."""

    def prepare(self, tables: Sequence[int]) -> None:
        """Have memory, if shapes are known. Every rank calls this; `tables` are those of which some rank has rows.

        Raises:
            MismatchError: The ranks have different sources. Raised on all of them.
        """
        self._tables.update(tables)
        infos = [info for i, info in enumerate(self._infos) if i not in self._tables]
        if infos and self._op is not hvdlite.Adasum and all(UNKNOWN not in info.shape for info in infos):
            self._buckets(infos, in_use=False)

    def exchange(
        self, own: Sequence[Gradient], weight: float, sources: Sequence[Any] = (), advice: Advice | None = None
    ) -> list[Gradient]:
        """The gradients of all ranks. Every rank calls this.

        Args:
            own: This rank's, like the sources.
            weight: Share of this rank in an average.
            sources: What `advice` looks at: backend's variables.
            advice: What to look for in the first exchanges.

        Returns:
            For each an array, or `Rows`, or None if no rank has one.

        Raises:
            MismatchError: The learning rates of the ranks differ. Raised on all of them, and nothing is changed.
            HvdliteError: The weights of all ranks are 0. Raised on all of them.
        """
        if self._op is hvdlite.Adasum:
            return self._adasum(own)
        infos = [_known(info, gradient) for info, gradient in zip(self._infos, own, strict=True)]
        looks = advice is not None and advice.is_due()
        rates = self._identity.rates() if self._identity is not None else ()
        while True:
            dense = [i for i in range(len(own)) if i not in self._tables]
            new = [i for i in dense if isinstance(own[i], Rows)]
            try:
                found = self._exchange_dense(
                    [infos[i] for i in dense],
                    [None if i in new else own[i] for i in dense],
                    Header(weight, news=bool(new) or looks, state=digest(rates)),
                )
                break
            except Postponed as stop:
                if not stop.told.news:
                    self._refuse_rates(rates)
                self._hear_news(new, looks, own, sources)
                looks = False
        results: dict[int, Gradient] = dict(zip(dense, found, strict=True))
        tables = sorted(self._tables)
        results.update(zip(tables, self._exchange_rows(tables, own, weight), strict=True))
        return [results[i] for i in range(len(own))]

    def _hear_news(self, new: list[int], looks: bool, own: Sequence[Gradient], sources: Sequence[Any]) -> None:
        """Some rank has rows of a new table, or wants to look for what goes wrong quietly; all ranks tell what they have."""
        everybody = self.gather((new, looks))
        self._tables.update(i for tables, _ in everybody for i in tables)
        if any(look for _, look in everybody):
            seen = self.gather(see(sources, own))
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
        everybody = hvdlite.allgather_object(value, name, process_set=self._process_set)
        return [each for each in everybody if each is not None]

    def _buckets(self, infos: Sequence[TensorInfo], in_use: bool) -> Buckets:
        if not self._channel:
            return (self._registry.use if in_use else self._registry.buckets)(infos, self._op)
        key = tuple(infos)
        if key not in self._own_buckets:
            self._own_buckets[key] = self._registry.own_buckets(infos, self._op)
        return self._own_buckets[key]

    def _exchange_dense(
        self, infos: Sequence[TensorInfo], own: Sequence[Array | None], said: Header
    ) -> list[Array | None]:
        if not infos:
            return []
        buckets = self._buckets(infos, in_use=True)
        found = buckets.exchange(own, said)
        self.joined = buckets.joined
        if self._identity is not None and self._identity.first is None:
            self._identity.first = buckets.last
        return found

    def _exchange_rows(self, tables: Sequence[int], own: Sequence[Gradient], weight: float) -> list[Rows | None]:
        if not tables:
            return []
        name = f"rows{self._channel and ' of '}{self._channel}"
        about = np.array([weight, *(own[i] is not None for i in tables)], np.float64)
        counts = hvdlite.allreduce(about, hvdlite.Sum, name, process_set=self._process_set)
        total, anywhere = float(counts[0]), counts[1:] > 0
        factor = 1.0
        if self._op is hvdlite.Average:
            if total <= 0 and anywhere.any():
                raise HvdliteError("the weights of all ranks add up to 0, so their sparse gradients have no average.")
            factor = weight / total if total else 0.0
        mine: list[Array] = []
        for i in tables:
            indices, values = self.as_rows(i, own[i])
            mine += [indices, values if factor == 1.0 else values * np.asarray(factor, values.dtype)]
        # Two operations: those of one have equal numbers of rows.
        gathered = iter(hvdlite.allgather(mine, f"all {name}", process_set=self._process_set))
        pairs = zip(gathered, gathered, strict=True)
        return [Rows(*pair) if there else None for pair, there in zip(pairs, anywhere, strict=True)]

    def _adasum(self, own: Sequence[Gradient]) -> list[Array | None]:
        there = self.gather_by_source([gradient is not None for gradient in own])
        chosen = [i for i, ranks in enumerate(there) if any(ranks)]
        if not chosen:
            return [None] * len(own)
        mine = [self.zeros(i) if own[i] is None else own[i] for i in chosen]
        name = f"gradients{self._channel and ' of '}{self._channel}"
        combined = hvdlite.allreduce(mine, hvdlite.Adasum, name, process_set=self._process_set)
        found = dict(zip(chosen, combined, strict=True))
        return [found.get(i) for i in range(len(own))]

    # Gradients in other forms

    def zeros(self, index: int) -> Array:
        """A gradient of zeros."""
        info = _known(self._infos[index], None)
        return np.zeros(info.shape, _dtype(info))

    def as_rows(self, index: int, gradient: Gradient) -> Rows:
        """A gradient of a table, whatever it is."""
        if isinstance(gradient, Rows):
            return gradient
        if gradient is None:
            info = self._infos[index]
            return Rows(np.zeros(0, np.int64), np.zeros((0, *info.shape[1:]), _dtype(info)))
        return Rows(np.arange(len(gradient)), gradient)

    def as_array(self, index: int, gradient: Gradient) -> Array:
        """A gradient, whatever it is. Of rows that are there more than once, the sum."""
        if isinstance(gradient, Rows):
            whole = self.zeros(index)
            np.add.at(whole, gradient.indices, gradient.values)
            return whole
        array: Array = self.zeros(index) if gradient is None else gradient
        return array


def _dtype(info: TensorInfo) -> Any:
    return tf.dtypes.as_dtype(info.dtype).as_numpy_dtype


def _known(info: TensorInfo, gradient: Gradient) -> TensorInfo:
    """`info` with the shape that the gradient has now."""
    if UNKNOWN not in info.shape:
        return info
    if gradient is None or isinstance(gradient, Rows):
        raise ArgumentError(
            f"a source of {info.dtype} whose shape is not known has no dense gradient here: use tensor.set_shape()."
        )
    return TensorInfo(info.dtype, gradient.shape)
