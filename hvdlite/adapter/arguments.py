"""Arguments as Horovod has them, in the terms of hvdlite: for the adapters."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

from hvdlite.api import Average, Sum, global_process_set, world
from hvdlite.errors import ArgumentError
from hvdlite.process_set import ProcessSet
from hvdlite.protocols import ReduceOp

P = ParamSpec("P")
R = TypeVar("R")
Everybody = global_process_set
"""The default of `process_set`, named so that signatures read well."""


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


def with_scaled_input(
    function: Callable[P, R], scale: Callable[[Any, float], Any], factor: Callable[[int], float]
) -> Callable[P, R]:
    """An operation whose gradient is multiplied by a number.

    That is done to what goes in: programs write into what comes out, which must not be a view therefore.

    Args:
        function: The operation; its first parameter is a tensor, or several.
        scale: ``scale(given, number)`` returns what was given, with gradients that are multiplied by the number.
        factor: The number, by that of the ranks that take part.
    """
    signature = inspect.signature(function)
    first = next(iter(signature.parameters))

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments[first]
        tensors = list(given) if isinstance(given, Iterator) else given
        bound.arguments[first] = scale(tensors, factor(size_of(bound.arguments.get("process_set"))))
        return function(*bound.args, **bound.kwargs)

    return wrapped


def divided(size: int) -> float:
    """The factor of an average."""
    return 1 / size


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


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number is 1, 2, 4, 8, …"""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0
