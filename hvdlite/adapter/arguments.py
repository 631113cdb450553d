"""Converts and checks arguments for the adapters, whose functions have the parameters of Horovod."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

from hvdlite.api import Average, Sum, global_process_set, world
from hvdlite.errors import ArgumentError
from hvdlite.protocols import ReduceOp
from hvdlite.ranks.process_set import ProcessSet

P = ParamSpec("P")
R = TypeVar("R")
Everybody = global_process_set
"""The default of `process_set`. The name makes signatures readable."""


def choose_op(op: ReduceOp | None, average: bool | None, stacklevel: int = 3) -> ReduceOp:
    """Return the reduction that `op` or its old spelling `average` asks for; Average if both are None.

    Args:
        op, average: The arguments of the caller.
        stacklevel: The `stacklevel` of the warning, which shall point to the line that called the operation.

    Raises:
        ArgumentError: Both are given, or `average` is a reduction and not a truth value.
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
    """Return the number of the root within `process_set`. Programs give the root by its rank in the job, as in Horovod.

    Raises:
        ArgumentError: The root is not in the set.
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
    """Return the number of this process within a process set of which it is a member."""
    return world("rank()").engine(process_set).rank


def size_of(process_set: ProcessSet | None) -> int:
    """Return the number of ranks of a process set of which this process is a member."""
    return world("size()").engine(process_set).size


def group_of(tensors: Iterable[Any]) -> list[Any]:
    """Return the tensors of a grouped operation as a list.

    Raises:
        ArgumentError: `tensors` is a single tensor, or is not iterable.
    """
    if hasattr(tensors, "shape") or not isinstance(tensors, Iterable):
        raise ArgumentError(f"a grouped operation takes a list of tensors; got one {type(tensors).__name__}.")
    return list(tensors)


def with_first(function: Callable[P, R], change: Callable[[Any, Mapping[str, Any]], Any]) -> Callable[P, R]:
    """Return an operation whose first argument is looked at, and may be replaced, before each call.

    Args:
        function: The operation. Its first parameter is a tensor or several tensors.
        change: A function: ``change(given, arguments)`` returns what the operation is given instead of `given`. An iterator
            comes to it as a list. `arguments` are those of the call by their names, without those that were left out.
    """
    signature = inspect.signature(function)
    first = next(iter(signature.parameters))

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments[first]
        bound.arguments[first] = change(list(given) if isinstance(given, Iterator) else given, bound.arguments)
        return function(*bound.args, **bound.kwargs)

    return wrapped


def with_scaled_input(
    function: Callable[P, R], scale: Callable[[Any, float], Any], factor: Callable[[int], float]
) -> Callable[P, R]:
    """Return an operation whose gradient is multiplied by a number.

    `scale` is applied to the input of the operation, not to its output: programs write into the output, which therefore must
    not be a view.

    Args:
        function: The operation. Its first parameter is a tensor or several tensors.
        scale: A function: ``scale(given, number)`` returns `given`, with gradients that are multiplied by `number`.
        factor: A function that returns the number for a given number of participating ranks.
    """
    return with_first(function, lambda given, said: scale(given, factor(size_of(said.get("process_set")))))


def divided(size: int) -> float:
    """Return the factor of an average over `size` ranks."""
    return 1 / size


def factors(prescale_factor: float, postscale_factor: float, process_set: ProcessSet) -> dict[str, Any]:
    """Return the arguments of a reduction that have the same names in hvdlite's core."""
    return {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor, "process_set": process_set}


def check_linear(call: str, op: ReduceOp) -> None:
    """Raise unless a reduction by `op` is linear, and so has a gradient.

    Args:
        call: The subject of the error text, such as "allreduce".
        op: The reduction.

    Raises:
        ArgumentError: `op` is neither Sum nor Average.
    """
    if op not in (Sum, Average):
        raise ArgumentError(
            f"{call} is differentiable for Sum and Average, not for {op!r}: cut its input off "
            "(torch: detach(), TensorFlow: tf.stop_gradient())."
        )


def as_list(given: Any) -> list[Any]:
    """Return a list or tuple as a list; any other object as a list of one element."""
    return list(given) if isinstance(given, list | tuple) else [given]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number is 1, 2, 4, 8, …

    Examples:
        >>> from hvdlite_tf import check_num_rank_power_of_2
        >>> [number for number in range(1, 10) if check_num_rank_power_of_2(number)]
        [1, 2, 4, 8]
    """
    return num_rank > 0 and num_rank & (num_rank - 1) == 0
