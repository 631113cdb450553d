"""Arguments as Horovod has them, in the terms of hvdlite: for the adapters."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from hvdlite.api import Average, Sum, global_process_set, world
from hvdlite.errors import ArgumentError
from hvdlite.process_set import ProcessSet
from hvdlite.protocols import ReduceOp


def choose_op(op: ReduceOp | None, average: bool | None, stacklevel: int = 3) -> ReduceOp:
    """The operation that `op` and its old spelling `average` ask for together; Average by default.

    Args:
        op, average: As the caller gave them.
        stacklevel: How far up, from here, the line is that called the operation: the warning points there.

    Raises:
        ArgumentError: Both are given, or `average` is no truth value.
    """
    if isinstance(average, ReduceOp):
        raise ArgumentError(f"average={average!r}: the operation has a parameter of its own; write op=hvd.{average!r}.")
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ArgumentError(
            f"op={op!r} and average={average!r}: give `op` alone, which has taken the place of `average`."
        )
    warnings.warn(
        f"average={average!r} is an old spelling: write op=hvd.{'Average' if average else 'Sum'}.",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
    return Average if average else Sum


def root_within(process_set: ProcessSet | None, root_rank: int) -> int:
    """The number within `process_set` of a root that is given, as Horovod does, by its rank in the job.

    Raises:
        ArgumentError: It is not in the set.
    """
    if process_set is None or process_set is global_process_set:
        return root_rank
    if root_rank not in process_set.members:
        raise ArgumentError(
            f"root_rank={root_rank!r}: expected the rank in the job of a member of {process_set}, "
            f"one of {', '.join(map(str, process_set.members))}."
        )
    return process_set.members.index(root_rank)


def rank_in(process_set: ProcessSet | None) -> int:
    """This process's number within a process set that it is in."""
    return world("rank()").engine(process_set).rank


def size_of(process_set: ProcessSet | None) -> int:
    """The number of ranks of a process set that this process is in."""
    return world("size()").engine(process_set).size


def group_of(tensors: Iterable[Any]) -> list[Any]:
    """The tensors of a grouped operation as a list.

    Raises:
        ArgumentError: It is one tensor, or nothing to go through.
    """
    if hasattr(tensors, "shape") or not isinstance(tensors, Iterable):
        raise ArgumentError(f"a grouped operation takes a list of tensors; got one {type(tensors).__name__}.")
    return list(tensors)


def factors(prescale_factor: float, postscale_factor: float, process_set: ProcessSet) -> dict[str, Any]:
    """The arguments of a reduction that hvdlite's core names alike."""
    return {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor, "process_set": process_set}


def check_linear(call: str, op: ReduceOp) -> None:
    """Let an operation pass that has a gradient.

    Raises:
        ArgumentError: It is not a linear one.
    """
    if op not in (Sum, Average):
        raise ArgumentError(
            f"{call} is differentiable for Sum and Average, not for {op!r}: cut its input off "
            "(torch: detach(), TensorFlow: tf.stop_gradient())."
        )


def as_list(given: Any) -> list[Any]:
    """A list or tuple as a list, anything else as a list of one."""
    return list(given) if isinstance(given, list | tuple) else [given]
