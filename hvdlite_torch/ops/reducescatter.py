"""Reducescatter in all its forms: blocking, asynchronous, and grouped. The blocking ones have gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch

import hvdlite
from hvdlite import Handle, ProcessSet, ReduceOp
from hvdlite.adapter.arguments import Everybody, as_list, check_linear, factors, group_of, size_of
from hvdlite.adapter.rows import rows_of_share
from hvdlite.tensors.compression import Compression, Compressor
from hvdlite_torch.ops.allreduce import allreduce
from hvdlite_torch.ops.differentiable import Tensors, differentiable

T = TypeVar("T")


def reducescatter(
    tensor: T,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = hvdlite.Average,
    process_set: ProcessSet = Everybody,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> T:
    """Reduce a tensor over the ranks and keep this rank's rows. See `hvdlite.reducescatter` for arguments, result and errors.

    The function is differentiable for Sum and Average: the gradient of `tensor` is the gradients of all ranks' rows, put
    together, multiplied by the factors, and divided by the number of ranks for Average.

    Args:
        compression: The dtype in which the ranks exchange the tensor, and its gradient; see `Compression`.

    Examples:
        >>> on_ranks(2, lambda: hvd.reducescatter(torch.tensor([1.0, 2.0]), op=hvd.Sum).tolist())
        [[2.0], [4.0]]
    """
    options = factors(prescale_factor, postscale_factor, process_set)
    lengths = [each.shape[0] if each.shape else 0 for each in as_list(tensor) if isinstance(each, torch.Tensor)]

    def backward(gradients: Tensors) -> Tensors:
        check_linear("reducescatter", op)
        factor = prescale_factor * postscale_factor / (size_of(process_set) if op is hvdlite.Average else 1)
        # An allreduce of rows among zeros, instead of an allgather: the rows of a rank that has joined since are 0.
        placed = [_place(*pair, process_set) for pair in zip(gradients, lengths, strict=True)]
        return [gradient * factor for gradient in allreduce(placed, op=hvdlite.Sum, process_set=process_set)]

    def forward(tensors: Tensors) -> Tensors:
        return hvdlite.reducescatter(tensors, op, name, **options)

    rows: T = differentiable(tensor, forward, backward, compression)
    return rows


def _place(rows: torch.Tensor, length: int, process_set: ProcessSet) -> torch.Tensor:
    """Return a tensor of `length` rows: this rank's share of them is `rows`, and the others are 0."""
    start, stop = rows_of_share(length, process_set)
    before, after = rows.new_zeros(start, *rows.shape[1:]), rows.new_zeros(length - stop, *rows.shape[1:])
    return torch.cat([before, rows, after])


def reducescatter_async(
    tensor: T,
    name: str | None = None,
    op: ReduceOp = hvdlite.Average,
    process_set: ProcessSet = Everybody,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[T]:
    """Start `reducescatter` and return a handle; `synchronize` waits for its result. `tensor` must not be changed before."""
    return hvdlite.reducescatter_async(tensor, op, name, **factors(prescale_factor, postscale_factor, process_set))


def grouped_reducescatter(
    tensors: Iterable[torch.Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = hvdlite.Average,
    process_set: ProcessSet = Everybody,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Run `reducescatter` on several tensors of any dtypes as one operation, and return the list of results.

    Examples:
        >>> def sums():
        ...     both = hvd.grouped_reducescatter([torch.tensor([1.0, 2.0]), torch.tensor([3, 4])], op=hvd.Sum)
        ...     return [each.tolist() for each in both]
        >>> on_ranks(2, sums)
        [[[2.0], [6]], [[4.0], [8]]]
    """
    return reducescatter(group_of(tensors), name, compression, op, process_set, prescale_factor, postscale_factor)


def grouped_reducescatter_async(
    tensors: Iterable[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = hvdlite.Average,
    process_set: ProcessSet = Everybody,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[torch.Tensor]]:
    """Start `grouped_reducescatter` and return a handle; `synchronize` waits for its list of results."""
    return reducescatter_async(group_of(tensors), name, op, process_set, prescale_factor, postscale_factor)
