"""Gradients in buckets: the hot path. Every rank has the same buckets in the same order, so nothing is negotiated.

What may differ between ranks travels inside the bucket::

    ├── gradient 9 ──┼── gradient 8 ──┼── … ──┼ used 9 ┼ used 8 ┼ … ┼ weight ┤     one flat array, summed over the ranks

`used` is 1 where this rank has a gradient, so that the sum says whether any rank has one. `weight` is the number of
samples that the gradients are the mean of: each rank's part is multiplied by its own weight and the sum divided by the
sum of the weights, which gives the gradient of the joined batch whatever the shares of the ranks, nothing included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hvdlite.errors import ArgumentError, HvdliteError, UnsupportedTensorError
from hvdlite.protocols import Array, Collectives, ReduceOp, TensorInfo
from hvdlite.tensors import HALF_DTYPES
from hvdlite.watch import Watch


class Slot(NamedTuple):
    """Where a tensor's gradient lies."""

    bucket: int
    start: int
    stop: int
    flag: int


class Bucket(NamedTuple):
    """One exchange: the gradients of some tensors, and what travels with them."""

    memory: Array
    tensors: tuple[int, ...]
    elements: int
    """How many elements of `memory` are gradients; then come the flags, then the weight."""


def plan_buckets(infos: Sequence[TensorInfo], bucket_bytes: int) -> list[list[int]]:
    """Which tensors share a bucket: those of one dtype, last tensors first, as backward passes deliver them.

    A bucket is closed when the next tensor would take it over `bucket_bytes`; a larger tensor gets one of its own.
    """
    buckets: list[list[int]] = []
    filling: dict[np.dtype[np.generic], tuple[list[int], int]] = {}
    for index in reversed(range(len(infos))):
        dtype = wire_dtype(infos[index].dtype)
        nbytes = math.prod(infos[index].shape) * dtype.itemsize
        current, total = filling.get(dtype, ([], 0))
        if not current or total + nbytes > bucket_bytes:
            current, total = [], 0
            buckets.append(current)
        current.append(index)
        filling[dtype] = (current, total + nbytes)
    return buckets


def wire_dtype(dtype: str) -> np.dtype[np.generic]:
    """The dtype in which gradients of `dtype` are summed.

    Raises:
        UnsupportedTensorError: There are no gradients of this dtype.
    """
    if dtype in HALF_DTYPES:
        return np.dtype(np.float32)
    if not dtype.startswith(("float", "complex")):
        raise UnsupportedTensorError(f"gradients are floating-point numbers; got a parameter of dtype {dtype}.")
    return np.dtype(dtype)


class Reducer:
    """The buckets of one model on one rank.

    Args:
        infos: Dtype and shape of each tensor, the same on every rank.
        collectives: For this reducer alone.
        op: SUM or AVERAGE.
        bucket_bytes: Size that a bucket may fill up to.
        ranks: The world ranks that take part, for messages.
        watch: Is told while an exchange lasts.

    Raises:
        ArgumentError: Another `op`.
        UnsupportedTensorError: A dtype that has no gradients.
    """

    def __init__(
        self,
        infos: Sequence[TensorInfo],
        collectives: Collectives,
        op: ReduceOp,
        bucket_bytes: int,
        ranks: Sequence[int],
        watch: Watch,
    ) -> None:
        if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            raise ArgumentError(f"op={op!r}: gradients are combined by Average or Sum.")
        self._collectives = collectives
        self._op = op
        self._ranks = ranks
        self._watch = watch
        self._steps = 0
        self._slots: list[Slot] = [Slot(0, 0, 0, 0)] * len(infos)
        self.buckets: list[Bucket] = []
        for tensors in plan_buckets(infos, bucket_bytes):
            start = 0
            elements = sum(math.prod(infos[index].shape) for index in tensors)
            for place, index in enumerate(tensors):
                stop = start + math.prod(infos[index].shape)
                self._slots[index] = Slot(len(self.buckets), start, stop, elements + place)
                start = stop
            memory = np.zeros(elements + len(tensors) + 1, wire_dtype(infos[tensors[0]].dtype))
            self.buckets.append(Bucket(memory, tuple(tensors), elements))

    def memory_of(self, index: int) -> Array:
        """The flat piece of bucket memory that holds the gradient of tensor `index`: write it before, read it after."""
        slot = self._slots[index]
        return self.buckets[slot.bucket].memory[slot.start : slot.stop]

    def exchange(self, used: Sequence[bool], weight: float = 1.0) -> list[bool]:
        """Combine the gradients in the buckets over the ranks, in place.

        Args:
            used: For each tensor, whether this rank has a gradient of it in `memory_of`.
            weight: Share of this rank in an average: the number of samples that its gradients are the mean of.

        Returns:
            For each tensor, whether any rank has a gradient of it; if none has, its memory holds zeros.

        Raises:
            HvdliteError: The weights of all ranks are 0, so there is no average.
        """
        self._steps += 1
        anywhere = [False] * len(used)
        total = 0.0
        for number, bucket in enumerate(self.buckets):
            memory, gradients = bucket.memory, bucket.memory[: bucket.elements]
            for place, index in enumerate(bucket.tensors):
                memory[bucket.elements + place] = used[index]
                if not used[index]:
                    self.memory_of(index)[:] = 0
            memory[-1] = weight
            if weight != 1.0:
                np.multiply(gradients, weight, out=gradients)
            self._reduce(number, memory)
            for place, index in enumerate(bucket.tensors):
                anywhere[index] = memory[bucket.elements + place].real > 0
            total = float(memory[-1].real)
            if self._op is ReduceOp.AVERAGE and total > 0:
                np.divide(gradients, memory[-1], out=gradients)
        if self._op is ReduceOp.AVERAGE and any(anywhere) and total <= 0:
            raise HvdliteError(
                "the weights of all ranks add up to 0, so their gradients have no average: skip this step on all ranks."
            )
        return anywhere

    def _reduce(self, number: int, memory: Array) -> None:
        if self._collectives.size == 1:
            return

        def what() -> str:
            return f"gradient exchange {self._steps}, bucket {number + 1} of {len(self.buckets)}"

        with self._watch.exchanging(what, self._ranks):
            self._collectives.allreduce(memory, ReduceOp.SUM)
