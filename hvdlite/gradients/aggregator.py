"""`Aggregator`: a program's own way to combine the gradients of a bucket, in one method.

By default a bucket is combined by a weighted sum in shared memory (`hvdlite.gradients.bucket`). An `Aggregator` does anything
else: it sends less (signs, the largest elements, a low rank), remembers what it has not sent, or combines otherwise than by a
mean. It sees a whole bucket and communicates by itself, as the compressor of PowerSGD must (Vogels et al., arXiv:1905.13727).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.gradients.segments import Memory
from hvdlite.protocols import Array, TensorInfo


class FlatBucket(NamedTuple):
    """The gradients of one rank, which become the combined ones. All ranks have the same layout.

    float16 and bfloat16 gradients are float32 here. They are rounded once, afterwards.

    Attributes:
        arrays: One array of shape ``(n,)`` for each dtype of the model, with all gradients of that dtype. A gradient that this
            rank does not have is zeros. `Aggregator.aggregate` overwrites the arrays.
        tensors: For the number of each parameter: the part of `arrays` that is its gradient, a view in its shape.

    Examples:
        >>> gradients = np.array([1.0, 2.0, 3.0])
        >>> bucket = hvd.FlatBucket([gradients], {0: gradients[:2].reshape(1, 2), 1: gradients[2:]})
        >>> bucket.arrays[0] *= 10
        >>> bucket.tensors[0].tolist()
        [[10.0, 20.0]]
    """

    arrays: list[Array]
    tensors: Mapping[int, Array]


class Weights(NamedTuple):
    """The numbers of samples that gradients are the mean of; 1 for each rank if the program has not set a number.

    Attributes:
        own: The samples of this rank; 0 if it has none.
        total: The samples of all ranks.

    Examples:
        >>> weights = hvd.Weights(own=2.0, total=8.0)
        >>> weights.own / weights.total
        0.25
    """

    own: float
    total: float


class Aggregator(Protocol):
    """Combines the gradients of the ranks. Every rank makes one, with equal settings.

    An aggregator may have ``name``, a text with its settings. The ranks compare it, or else the name of its class.

    It may have ``renumber(numbers)``, which is called when parameters are frozen or added: for each number of a parameter that
    is still there, its new number. What an aggregator remembers of a parameter by its number belongs to the new number then.

    An aggregator may have ``state_dict()`` and ``load_state_dict(state)``. Then its state is a part of the optimizer's state,
    and a broadcast of the optimizer's state gives all ranks the root's state of the aggregator. State that belongs to one rank,
    such as an error memory, is loaded again after the broadcast.

    Examples:
        >>> class Mean:
        ...     def aggregate(self, bucket, weights, collectives):
        ...         for array in bucket.arrays:
        ...             array *= weights.own / weights.total
        ...             collectives.allreduce(array, hvd.Sum)
        >>> def step():
        ...     weight = torch.nn.Parameter(torch.zeros(1))
        ...     optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), aggregator=Mean())
        ...     (weight * hvd.rank()).sum().backward()
        ...     optimizer.step()
        ...     return weight.item()
        >>> on_ranks(2, step)
        [-0.5, -0.5]
    """

    def aggregate(self, bucket: FlatBucket, weights: Weights, collectives: HierarchicalCollectives) -> None:
        """Combine the gradients of one step. All ranks call this once in each step in which any rank has a gradient.

        Args:
            bucket: This rank's gradients, zeros if it has no data. Afterwards the combined ones, which must be the same on all
                ranks, bit for bit; if not, the parameters of the ranks differ from then on.
            weights: The weights for a weighted mean.
            collectives: The operations of all ranks. All ranks call the same ones, in the same order.
        """
        ...


def name_of(aggregator: Aggregator | None) -> str:
    """Return what the ranks compare, for they must have equal aggregators."""
    if aggregator is None:
        return "none"
    return str(getattr(aggregator, "name", type(aggregator).__name__))


def run_aggregator(
    aggregator: Aggregator,
    memories: Sequence[Memory],
    rank: int,
    infos: Sequence[TensorInfo],
    weights: Weights,
    collectives: HierarchicalCollectives,
) -> None:
    """Let an aggregator combine the gradients in the memory of this rank's buffer.

    Args:
        aggregator: The program's aggregator.
        memories: One for each dtype. Results lie where gradients lie.
        rank: This rank's number on its host.
        infos: Dtype and shape of each tensor of the model.
        weights: See `Aggregator.aggregate`.
        collectives: The operations of all ranks, for this bucket alone.
    """
    here = [memory.gradients[rank] for memory in memories]
    arrays: list[Array] = []
    tensors: dict[int, Array] = {}
    for memory, flat in zip(memories, here, strict=True):
        how, wide = memory.how, flat
        if weights.own == 0:  # the gradients of a rank without samples may be anything
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
