"""Allreduce in all its forms: blocking, asynchronous, in place, and grouped. The blocking ones have gradients."""

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
    """Reduce a tensor elementwise over the ranks. See `hvdlite.allreduce` for the other arguments, the result and the errors.

    The function is differentiable for Sum and Average: the gradient of `tensor` is the same allreduce of the ranks' gradients.

    Args:
        average: The old spelling of `op`: True means Average, False means Sum.
        compression: The dtype in which the ranks exchange the tensor, and its gradient; see `Compression`.
        op: The reduction; None means Average.

    Raises:
        ArgumentError: `average` and `op` are both given, or one of them has a value that is not allowed.

    Examples:
        >>> on_ranks(2, lambda: hvd.allreduce(torch.tensor([1.0, hvd.rank()])).tolist())
        [[1.0, 0.5], [1.0, 0.5]]
        >>> on_ranks(2, lambda: hvd.allreduce(torch.tensor([1.0, hvd.rank()]), op=hvd.Sum).tolist())
        [[2.0, 1.0], [2.0, 1.0]]
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
    """Start `allreduce` and return a handle; `synchronize` waits for its result. `tensor` must not be changed before.

    Examples:
        >>> def overlapped():
        ...     handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
        ...     return hvd.synchronize(handle).tolist()  # after what the program does meanwhile
        >>> on_ranks(2, overlapped)
        [[2.0, 2.0], [2.0, 2.0]]
    """
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
    """Overwrite `tensor` with what `allreduce` returns, and return `tensor`.

    Autograd records this as a differentiable change in place. A parameter (or another leaf that requires a gradient) is
    overwritten as under ``torch.no_grad()``.

    Examples:
        >>> def overwritten():
        ...     tensor = torch.full((2,), float(hvd.rank()))
        ...     hvd.allreduce_(tensor)
        ...     return tensor.tolist()
        >>> on_ranks(2, overwritten)
        [[0.5, 0.5], [0.5, 0.5]]
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
    """Start `allreduce_` and return a handle; `tensor` has the result when `synchronize` has returned.

    Raises:
        UnsupportedTensorError: Autograd would have to record this change of `tensor`, and cannot.
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
    """Run `allreduce` on several tensors of any dtypes as one operation. Return the list of results. See `allreduce`.

    Examples:
        >>> def sums():
        ...     both = hvd.grouped_allreduce([torch.ones(2), torch.tensor([hvd.rank()])], op=hvd.Sum)
        ...     return [each.tolist() for each in both]
        >>> on_ranks(2, sums)
        [[[2.0, 2.0], [1]], [[2.0, 2.0], [1]]]
    """
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
    """Start `grouped_allreduce` and return a handle; `synchronize` waits for its list of results."""
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
    """Overwrite several tensors with what `grouped_allreduce` returns, and return them as a list. See `allreduce_`.

    Examples:
        >>> def overwritten():
        ...     tensors = [torch.ones(2), torch.tensor([hvd.rank()])]
        ...     hvd.grouped_allreduce_(tensors, op=hvd.Sum)
        ...     return [each.tolist() for each in tensors]
        >>> on_ranks(2, overwritten)
        [[[2.0, 2.0], [1]], [[2.0, 2.0], [1]]]
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
    """Start `grouped_allreduce_` and return a handle; the tensors have the results when `synchronize` has returned.

    Raises:
        UnsupportedTensorError: Autograd would have to record the change of one of the tensors, and cannot.
    """
    chosen = choose_op(op, average)
    return allreduce_async_(group_of(tensors), None, name, chosen, prescale_factor, postscale_factor, process_set)
