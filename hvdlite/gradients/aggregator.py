"""How the gradients of a bucket are combined, where a program says it: one method.

The plain way is the weighted sum in shared memory (`hvdlite.gradients.bucket`). An `Aggregator` does anything else: it sends
less (signs, the largest elements, a low rank), remembers what it has left out, or combines otherwise than by a mean. It sees a
whole bucket and does the communication itself, as the compressor of PowerSGD has to (Vogels et al., arXiv:1905.13727).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from hvdlite.gradients.segments import Memory
from hvdlite.protocols import Array, Collectives, TensorInfo


class FlatBucket(NamedTuple):
    """The gradients of one rank, and the place of the combined ones. All ranks have the same layout.

    float16 and bfloat16 gradients are float32 here, and are rounded once, afterwards.

    Attributes:
        arrays: One array of shape ``(n,)`` for each dtype of the model, with all gradients of that dtype. Where this rank has
            no gradient, there are zeros. `Aggregator.aggregate` overwrites them.
        tensors: By the number of the parameter: the part of `arrays` that is its gradient, in its shape.
    """

    arrays: list[Array]
    tensors: Mapping[int, Array]


class Weights(NamedTuple):
    """How many samples gradients are the mean of; 1 for each rank if the program has not said it.

    Attributes:
        own: Those of this rank; 0 if it has none.
        total: Those of all ranks.
    """

    own: float
    total: float


class Aggregator(Protocol):
    """Combines the gradients of the ranks. Every rank makes one, with equal settings.

    It may have ``state_dict()`` and ``load_state_dict(state)``; then its state is part of the optimizer's.
    """

    def aggregate(self, bucket: FlatBucket, weights: Weights, collectives: Collectives) -> None:
        """Combine the gradients of one step. All ranks call this once in each step in which any rank has a gradient.

        Args:
            bucket: With this rank's gradients, zeros if it has no data; afterwards with the combined ones. These must be the
                same on all ranks, bit for bit, or parameters come apart.
            weights: By what a mean is weighted.
            collectives: What the ranks do together. All ranks make the same calls, in the same order.
        """
        ...


def run_aggregator(
    aggregator: Aggregator,
    memories: Sequence[Memory],
    rank: int,
    infos: Sequence[TensorInfo],
    weights: Weights,
    collectives: Collectives,
) -> None:
    """Let an aggregator combine what is in the memory of this rank's buffer.

    Args:
        aggregator: The program's.
        memories: One for each dtype, with results where gradients are.
        rank: This rank's number on its host.
        infos: Dtype and shape of each tensor of the model.
        weights: As for `Aggregator.aggregate`.
        collectives: Over all ranks, for this bucket alone.
    """
    here = [memory.gradients[rank] for memory in memories]
    arrays: list[Array] = []
    tensors: dict[int, Array] = {}
    for memory, flat in zip(memories, here, strict=True):
        how, wide = memory.how, flat
        if weights.own == 0:  # who has no samples may hold anything
            flat[:] = 0
        if not how.exact:
            wide = np.empty(flat.size, how.wide_dtype)
            how.combine((flat,), wide)
        arrays.append(wide)
        for index, (start, stop) in memory.block.spans.items():
            tensors[index] = wide[start:stop].reshape(infos[index].shape)
    aggregator.aggregate(FlatBucket(arrays, tensors), weights, collectives)
    for memory, flat, wide in zip(memories, here, arrays, strict=True):
        if wide is not flat:
            memory.how.narrow(wide, flat)
