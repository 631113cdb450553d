"""How many buckets there are, and whether they travel while the backward pass runs."""

from __future__ import annotations

from collections.abc import Sequence

BUCKET_SECONDS = 1e-3
"""The seconds that a bucket's exchange should take: long against its meetings (0.1 ms), short against a backward pass."""


MAX_FAILED = 2
"""After so many failed speculations, buckets do not travel early any more."""


def longest(orders: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return the order that all ranks follow: the longest, because a rank without samples has seen no gradients."""
    return max(orders, key=len)


def plan_buckets(
    order: Sequence[int], nbytes: Sequence[int], bucket_bytes: int, first_bytes: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Deal tensors out to buckets.

    Args:
        order: The tensors in the order in which the backward pass has their gradients, each once; some may be missing.
        nbytes: The bytes of each tensor of the model.
        bucket_bytes: The bytes of a bucket, about: no tensor is cut.
        first_bytes: The bytes of the first bucket; None for `bucket_bytes`.

    Returns:
        The buckets in the order of their exchanges. The last one has the tensors that are not in `order`. The tuple is empty if
        one bucket is enough.
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
