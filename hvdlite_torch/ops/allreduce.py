"""allreduce in all its forms.

The names, and the order and defaults of the arguments, are Horovod's. Blocking forms that return a new tensor are
differentiable for Sum and Average, and so are those in place. Asynchronous ones are not, and take tensors that require a
gradient as they take others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch

import hvdlite
from hvdlite import Handle, ProcessSet, ReduceOp
from hvdlite.adapter.arguments import Everybody, check_linear, choose_op, factors, group_of
from hvdlite.tensors.compression import Compression, Compressor
from hvdlite_torch.ops.differentiable import Exchange, Tensors, differentiable, overwriting, overwritten_later

T = TypeVar("T")


def allreduce(
    tensor: T,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = Everybody,
    *,
    algorithm: str | None = None,
) -> T:
    """Reduce a tensor elementwise over the ranks. Differentiable for Sum and Average.

    The gradient is the same allreduce of the ranks' gradients: that of the sum of all ranks' losses.

    Args:
        tensor: Any shape and dtype, the same on every rank; or a list of tensors, exchanged as one.
        average: An old spelling of `op`: True for Average, False for Sum.
        name: Calls of equal name belong together on all ranks; without names, calls belong together by their order.
        compression: How the tensor travels; see `Compression`.
        op: Sum, Average, Min, Max, Product or Adasum; Average by default. See `hvdlite.allreduce`.
        prescale_factor: Multiplies each rank's values before they are reduced.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part.
        algorithm: As in `hvdlite.allreduce`.

    Returns:
        A new tensor (or a list) of the same dtype and shape.

    Raises:
        ArgumentError: `average` and `op` are both given, or are none of those.
        UnsupportedTensorError: `tensor` is none, or `op` is not defined for its dtype.
        MismatchError: The ranks' calls do not belong together; raised on all of them.
        DuplicateNameError: `name` is in flight.
    """
    chosen = choose_op(op, average)
    options = factors(prescale_factor, postscale_factor, process_set) | {"algorithm": algorithm}

    def forward(tensors: Tensors) -> Tensors:
        return hvdlite.allreduce(tensors, chosen, name, **options)

    reduced: T = differentiable(tensor, forward, _backward(chosen, options), compression)
    return reduced


def _backward(op: ReduceOp, options: dict[str, Any]) -> Exchange:
    def backward(gradients: Tensors) -> Tensors:
        check_linear("allreduce", op)
        return allreduce(gradients, op=op, **options)

    return backward


def allreduce_async(
    tensor: T,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = Everybody,
) -> Handle[T]:
    """Start `allreduce`; `synchronize` of what this returns waits for the result. `tensor` must not be changed before."""
    options = factors(prescale_factor, postscale_factor, process_set)
    return hvdlite.allreduce_async(tensor, choose_op(op, average), name, **options)


def allreduce_(
    tensor: T,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = Everybody,
) -> T:
    """Overwrite `tensor` with what `allreduce` returns. For autograd that is a change in place, and differentiable.

    A parameter (or another leaf that requires a gradient) is overwritten as under ``torch.no_grad()``.

    Returns:
        `tensor`.
    """
    chosen = choose_op(op, average)
    options = factors(prescale_factor, postscale_factor, process_set)

    def forward(tensors: Tensors) -> Tensors:
        return hvdlite.allreduce(tensors, chosen, name, inplace=True, **options)

    reduced: T = overwriting(tensor, forward, _backward(chosen, options))
    return reduced


def allreduce_async_(
    tensor: T,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = Everybody,
) -> Handle[T]:
    """Start `allreduce_`; after `synchronize` of what this returns, `tensor` is overwritten.

    Raises:
        UnsupportedTensorError: Autograd would have to record it.
    """
    options = factors(prescale_factor, postscale_factor, process_set)
    chosen = choose_op(op, average)
    return hvdlite.allreduce_async(overwritten_later(tensor), chosen, name, inplace=True, **options)


def grouped_allreduce(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = Everybody,
) -> list[torch.Tensor]:
    """`allreduce` of several tensors at once, of any dtypes and shapes. Arguments as there; returns a list."""
    chosen = choose_op(op, average)
    options = factors(prescale_factor, postscale_factor, process_set)
    return allreduce(group_of(tensors), None, name, compression, chosen, **options)


def grouped_allreduce_async(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = Everybody,
) -> Handle[list[torch.Tensor]]:
    """Start `grouped_allreduce`; `synchronize` of what this returns waits for the list of results."""
    options = factors(prescale_factor, postscale_factor, process_set)
    return hvdlite.allreduce_async(group_of(tensors), choose_op(op, average), name, **options)


def grouped_allreduce_(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = Everybody,
) -> list[torch.Tensor]:
    """Overwrite several tensors with what `grouped_allreduce` returns. For autograd as `allreduce_`.

    Returns:
        `tensors`, as a list.
    """
    chosen = choose_op(op, average)
    return allreduce_(group_of(tensors), None, name, chosen, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async_(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = Everybody,
) -> Handle[list[torch.Tensor]]:
    """Start `grouped_allreduce_`: as `allreduce_async_`, of several tensors."""
    chosen = choose_op(op, average)
    return allreduce_async_(group_of(tensors), None, name, chosen, prescale_factor, postscale_factor, process_set)
