"""How all ranks of a group make the buckets of a layout together, or hear what they disagree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from hvdlite.errors import HvdliteError
from hvdlite.gpu.collectives import DeviceCollectives
from hvdlite.gradients.device.bucket import DeviceBucket, Layout
from hvdlite.gradients.device.reducer import DeviceReducer
from hvdlite.gradients.device.rules import Rules
from hvdlite.gradients.layout import digest_of
from hvdlite.gradients.plan import plan_buckets
from hvdlite.operations import Agreement, Operation
from hvdlite.tensors.reduction import nbytes_of

FIRST_BYTES = 2**20
"""Of the first bucket: it is to be on its way early. As torch's DistributedDataParallel has it."""


class Together(NamedTuple):
    """How the ranks of a group do something together.

    Attributes:
        run: Runs an operation with the other ranks.
        gather: Gives every rank's value to every rank, in the order of `ranks`; None of one that has joined.
        ranks: The world ranks.
        waiting: For a with statement: the host waits for what other ranks say.
    """

    run: Callable[[Operation], Any]
    gather: Callable[[Any], list[Any]]
    ranks: Sequence[int]
    waiting: AbstractContextManager[Any]


def make_reducer(
    layout: Layout,
    order: Sequence[int],
    collectives: DeviceCollectives,
    rules: Rules,
    bucket_bytes: int,
    together: Together,
    kind: type[DeviceBucket] = DeviceBucket,
) -> DeviceReducer:
    """Flat memory for the gradients of a layout. All ranks of the group call this, with equal arguments.

    Args:
        layout: Of each gradient.
        order: In which they are expected; a part of them will do.
        collectives: For this reducer, and others of the same caller that are used in turn.
        rules: How they are exchanged.
        bucket_bytes: Of a bucket, about.
        together: The group.
        kind: What the buckets are made of.

    Raises:
        MismatchError: The ranks do not agree on one of these. Raised on all of them.
        HvdliteError: A rank has no room for the buckets. Raised on all of them.
        UnsupportedTensorError: A dtype that has no gradients.
    """
    nbytes = [nbytes_of(info) for info, _ in layout]
    groups = plan_buckets(order, nbytes, bucket_bytes, FIRST_BYTES) or (tuple(range(len(layout))),)
    arguments = [
        ("tensors", len(layout)),
        ("op", rules.op.value),
        ("compression", rules.wire_of("float32")),
        ("bucket_bytes", bucket_bytes),
        ("layout", digest_of(([(tuple(info), tuple(strides)) for info, strides in layout], groups, tuple(rules)))),
    ]
    together.run(Agreement("gradient buckets on a GPU", arguments, lambda _: None))
    device = collectives.device
    problem, buckets = "", []
    try:
        buckets = [kind(layout, group, collectives, rules) for group in groups]
    except device.no_memory as error:
        problem = f"no room for {sum(nbytes)} bytes of gradients on {device.place}: {error}"
    raise_together(problem, together)
    return DeviceReducer(buckets, len(layout), collectives, together.waiting)


def raise_together(problem: str, together: Together) -> None:
    """Go on if no rank has a problem. Every rank calls this.

    Args:
        problem: This rank's, in words; empty if it has none.
        together: The group.

    Raises:
        HvdliteError: Some rank has one. The same text on all ranks.
    """
    answers = zip(together.ranks, together.gather(problem), strict=True)
    problems = [f"rank {rank}: {text}" for rank, text in answers if text]
    if problems:
        raise HvdliteError("; ".join(problems))
