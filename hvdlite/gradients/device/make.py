"""How all ranks of a group make the buckets of a layout together, or raise an error that says what they disagree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from hvdlite.comm.gpu.collectives import DeviceCollectives
from hvdlite.errors import HvdliteError
from hvdlite.gradients.device.bucket import DeviceBucket, Layout
from hvdlite.gradients.device.reducer import DeviceReducer
from hvdlite.gradients.device.rules import Rules
from hvdlite.gradients.layout import digest_of
from hvdlite.gradients.planner import plan_buckets
from hvdlite.operations import Agreement, Operation
from hvdlite.ranks.together import Together
from hvdlite.tensors.reduction import nbytes_of

FIRST_BYTES = 2**20
"""The bytes of the first bucket: few, so that it is sent early, as in torch's DistributedDataParallel."""


def make_reducer(
    layout: Layout,
    order: Sequence[int],
    collectives: DeviceCollectives,
    rules: Rules,
    bucket_bytes: int,
    together: Together,
    run: Callable[[Operation], Any],
    waiting: AbstractContextManager[Any],
    kind: type[DeviceBucket] = DeviceBucket,
) -> DeviceReducer:
    """Make flat memory for the gradients of a layout. All ranks of the group call this, with equal arguments.

    Args:
        layout: The layout of all gradients.
        order: The numbers of the gradients in the order in which they are expected; some may be missing.
        collectives: The collectives for this reducer, and for other reducers of the same caller that are used in turn.
        rules: How gradients are scaled, cast and cut into shares.
        bucket_bytes: The bytes of a bucket, about.
        together: The ranks of the group.
        run: Runs an operation with the other ranks.
        waiting: A context manager for code in which the host waits for other ranks.
        kind: The class of the buckets.

    Raises:
        MismatchError: The ranks have different arguments. All ranks raise it.
        HvdliteError: A rank has not enough memory for the buckets. All ranks raise it.
        UnsupportedTensorError: A dtype is neither floating-point nor complex.
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
    run(Agreement("gradient buckets on a GPU", arguments, lambda _: None))
    device = collectives.device
    problem, buckets = "", []
    try:
        buckets = [kind(layout, group, collectives, rules) for group in groups]
    except device.no_memory as error:
        problem = f"no room for {sum(nbytes)} bytes of gradients on {device.place}: {error}"
    together.raise_if(
        problem, lambda problems: HvdliteError("; ".join(f"rank {rank}: {text}" for rank, text in problems.items()))
    )
    return DeviceReducer(buckets, len(layout), collectives, waiting)
