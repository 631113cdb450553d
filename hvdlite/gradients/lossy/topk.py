"""`TopK`: sends the largest elements of each gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.errors import ArgumentError
from hvdlite.gradients.aggregator import FlatBucket, Weights
from hvdlite.gradients.lossy.memory import Errors, ExactSteps, make_unusable
from hvdlite.protocols import Array, ReduceOp


class TopK:
    """Combines the elements of each gradient whose absolute values are the largest (Aji and Heafield, arXiv:1704.05021).

    Each rank sends the places and values of its own largest elements to all. The others are added to this rank's next gradient
    (`Errors`). A rank with samples counts by their number, as in a plain average. The bytes grow with the number of ranks.

    Args:
        ratio: Which part of the elements of a parameter travels, from 0 to 1.
        exact_steps: The number of steps at the beginning in which gradients travel whole.
        smallest: Parameters with fewer elements travel whole.

    Attributes:
        name: The settings, which must be equal on all ranks.

    Raises:
        ArgumentError: An argument has a value that is not allowed.
    """

    def __init__(self, ratio: float = 0.01, *, exact_steps: int = 0, smallest: int = 1024) -> None:
        if not 0 < ratio <= 1:
            raise ArgumentError(f"topk(ratio={ratio!r}): expected a part of the elements, above 0 and at most 1.")
        if exact_steps < 0 or smallest < 0:
            raise ArgumentError(f"topk(exact_steps={exact_steps}, smallest={smallest}): expected numbers from 0 on.")
        self._ratio, self._smallest = ratio, smallest
        self.name = f"topk({ratio:g}, exact_steps={exact_steps}, smallest={smallest})"
        self._steps = ExactSteps("topk", exact_steps)
        self._errors = Errors()

    def __repr__(self) -> str:
        return self.name

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """See `Aggregator`."""
        self._errors.renumber(numbers)

    def aggregate(self, bucket: FlatBucket, weights: Weights, collectives: HierarchicalCollectives) -> None:
        """See `Aggregator.aggregate`.

        Raises:
            MismatchError: The ranks go on after different numbers of steps, with `exact_steps`. Raised on all ranks.
        """
        share = weights.own / weights.total
        is_exact = self._steps.begin(collectives)
        for array in bucket.arrays:
            views = {number: view.reshape(-1) for number, view in bucket.tensors.items() if view.dtype == array.dtype}
            large = {number: view for number, view in views.items() if view.size >= max(1, self._smallest)}
            if is_exact or not large:
                array *= share
                collectives.allreduce(array, ReduceOp.SUM)
                continue
            small = [view for number, view in views.items() if number not in large]
            if small:
                together = np.concatenate(small)
                together *= share
                collectives.allreduce(together, ReduceOp.SUM)
                for view, part in zip(
                    small, np.split(together, np.cumsum([view.size for view in small])[:-1]), strict=True
                ):
                    view[:] = part
                if not np.isfinite(together).all():
                    make_unusable(large.values())
                    continue
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found in what was sent
                self._combine(large, weights.own > 0, share, collectives)

    def _combine(
        self, views: Mapping[int, Array], has_data: bool, share: float, collectives: HierarchicalCollectives
    ) -> None:
        """Combine flat gradients of one dtype, in place."""
        counts = {number: max(1, round(self._ratio * view.size)) for number, view in views.items()}
        dtype = next(iter(views.values())).dtype
        places = np.concatenate([self._chosen(number, views[number], counts[number], has_data) for number in views])
        values, left, start = np.empty(len(places), dtype), {}, 0
        for number, view in views.items():
            chosen = places[start : start + counts[number]]
            values[start : start + counts[number]] = view[chosen]
            if has_data:
                left[number] = view.copy()
                left[number][chosen] = 0
            start += counts[number]
        values *= share
        own = np.concatenate([places.view(np.uint8), values.view(np.uint8)])
        everybody = np.empty(collectives.size * own.size, np.uint8)
        collectives.allgather(own, everybody, [own.size] * collectives.size)
        found = [
            (theirs[: places.nbytes].copy().view(places.dtype), theirs[places.nbytes :].copy().view(dtype))
            for theirs in everybody.reshape(collectives.size, -1)
        ]
        if not all(np.isfinite(what).all() for _, what in found):
            make_unusable(views.values())
            return
        for number, rest in left.items():
            self._errors.keep(number, rest)
        for view in views.values():
            view[:] = 0
        # All ranks add in the order of ranks, so that they have the same result, bit for bit.
        for where, what in found:
            start = 0
            for number, view in views.items():
                part = slice(start, start + counts[number])
                view[where[part]] += what[part]
                start += counts[number]

    def _chosen(self, number: int, view: Array, count: int, has_data: bool) -> Array:
        """Return the places of the largest elements of a gradient, after what was not sent before was added to it."""
        kind = np.int32 if view.size <= np.iinfo(np.int32).max else np.int64
        if not has_data:
            return np.arange(count, dtype=kind)  # their values are zeros
        self._errors.add_to(number, view)
        places: Array = np.argpartition(np.abs(view), view.size - count)[view.size - count :].astype(kind)
        return places

    def state_dict(self) -> dict[str, Any]:
        """Return the state: ``step`` is the same on all ranks, ``errors`` belong to this rank."""
        return {"step": self._steps.made, "errors": self._errors.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that `state_dict` has returned."""
        self._steps.load(state["step"])
        self._errors.load(state["errors"])
