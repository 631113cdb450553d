"""How many buckets, and whether they travel while the backward pass runs."""

from __future__ import annotations

import os
from collections.abc import Sequence

BUCKET_SECONDS = 1e-3
"""What a bucket's exchange should take: long against the meetings around it (0.1 ms), short against a backward pass."""


PATIENCE = 2
"""After so many lost bets overlapping is given up."""


def has_free_core(local_size: int) -> bool:
    """Whether each rank of this host can have a second core to itself."""
    return len(os.sched_getaffinity(0)) >= 2 * local_size


def longest(orders: Sequence[Sequence[int]]) -> Sequence[int]:
    """The order that all ranks follow, of those that each has seen: some rank may have had no samples, and so no gradients."""
    return max(orders, key=len)


def plan_buckets(
    order: Sequence[int], nbytes: Sequence[int], bucket_bytes: int, first_bytes: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Deal tensors out to buckets.

    Args:
        order: Tensors in the order in which the backward pass has their gradients, each once; maybe not all.
        nbytes: Bytes of each tensor of the model.
        bucket_bytes: Of a bucket, about: no tensor is cut.
        first_bytes: Of the first bucket, if it is to be of another size.

    Returns:
        Buckets in the order of their exchanges. What is not in `order` is in the last one. Empty if one bucket is all.
    """
    buckets: list[list[int]] = [[]]
    held, wanted = 0, bucket_bytes if first_bytes is None else first_bytes
    for index in order:
        if held >= wanted:
            buckets.append([])
            held, wanted = 0, bucket_bytes
        buckets[-1].append(index)
        held += nbytes[index]
    buckets[-1] += sorted(set(range(len(nbytes))).difference(order))
    return tuple(map(tuple, buckets)) if len(buckets) > 1 else ()
