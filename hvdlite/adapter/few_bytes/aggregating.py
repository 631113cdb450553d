"""`OptimizerAggregator`: an aggregator that combines the gradients of one optimizer, in the memory that all optimizers share.

A rank that has joined makes memory for the gradients of the others when they need it, and takes part with its own aggregator,
so that the aggregators of all ranks go on alike. So the ranks number their aggregators when they are made::

    the others:  gradients ─▶ numbers of their sources ─▶ layout, with the number of the aggregator ─▶ reducer
    a rank that has joined:                                 the same layout ─▶ its aggregator ─▶ reducer

An aggregator remembers something of each source by its number, which must not change although other sources may be missing.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.errors import ArgumentError
from hvdlite.gradients.aggregator import Aggregator, FlatBucket, Weights, name_of
from hvdlite.gradients.shared_reducers import Layout
from hvdlite.protocols import TensorInfo


class OptimizerAggregator:
    """The aggregator of one optimizer on one rank.

    Args:
        aggregator: The program's aggregator.

    Attributes:
        aggregator: The program's aggregator.
        number: The number by which the ranks know it in the present world and process set.
    """

    def __init__(self, aggregator: Aggregator) -> None:
        self.aggregator = aggregator
        self.number = 0
        self._sources: list[weakref.ref[Any]] = []
        self._infos: dict[int, TensorInfo] = {}

    def numbers_of(self, sources: Sequence[Any]) -> tuple[int, ...]:
        """Return the numbers of sources: their places in the first call of this method.

        Args:
            sources: Objects that live as long as the model, such as its variables.

        Raises:
            ArgumentError: A source was not among those of the first call.
        """
        if not self._sources:
            self._sources = [weakref.ref(source) for source in sources]
        places = {id(source): place for place, each in enumerate(self._sources) if (source := each()) is not None}
        found = [places.get(id(source)) for source in sources]
        if None in found:
            raise ArgumentError(
                f"{name_of(self.aggregator)} remembers something of each variable, and this is another variable than the "
                f"{len(self._sources)} of its first step: make one for each optimizer, and give the optimizer all variables in "
                "its first step."
            )
        return tuple(place for place in found if place is not None)

    def check(self, numbers: Sequence[int], infos: Sequence[TensorInfo]) -> None:
        """Raise unless the gradients of these numbers have the dtypes and shapes that they had before.

        Raises:
            ArgumentError: One has another dtype or shape.
        """
        for number, info in zip(numbers, infos, strict=True):
            before = self._infos.setdefault(number, info)
            if before != info:
                raise ArgumentError(
                    f"{name_of(self.aggregator)} remembers something of each gradient, and gradient {number} is now "
                    f"{info.dtype} of shape {info.shape}, and was {before.dtype} of shape {before.shape}: make another one for "
                    "another model."
                )

    def of(self, layout: Layout) -> Aggregator:
        """Return the aggregator for a reducer of this layout."""
        return _Numbered(self.aggregator, layout.numbers)


class _Numbered:
    """An aggregator that knows each gradient by another number than the reducer does."""

    def __init__(self, aggregator: Aggregator, numbers: Sequence[int]) -> None:
        self._aggregator, self._numbers = aggregator, numbers

    def aggregate(self, bucket: FlatBucket, weights: Weights, collectives: HierarchicalCollectives) -> None:
        tensors = {self._numbers[place]: view for place, view in bucket.tensors.items()}
        self._aggregator.aggregate(bucket._replace(tensors=tensors), weights, collectives)
