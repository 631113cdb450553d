"""reducescatter in all its forms.

The names, and the order and defaults of the arguments, are Horovod's. Blocking forms are differentiable for Sum and
Average; asynchronous ones are not, and take tensors that require a gradient as they take others.
"""

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
    """Reduce a tensor over the ranks, and keep this rank's share of the rows. Differentiable for Sum and Average.

    Args:
        tensor: At least 1-d, of the same shape and dtype on every rank; or a list of tensors. Where the ranks do not divide the
            first dimension, the first ranks get one row more.
        name: As in `allreduce`.
        compression: As in `allreduce`.
        op: Sum, Average, Min, Max or Product.
        process_set: As in `allreduce`.
        prescale_factor: As in `allreduce`.
        postscale_factor: As in `allreduce`.

    Returns:
        This rank's rows of the reduced tensor.

    Raises:
        As `allreduce`.
    """
    options = factors(prescale_factor, postscale_factor, process_set)

    lengths = [each.shape[0] if each.shape else 0 for each in as_list(tensor) if isinstance(each, torch.Tensor)]

    def backward(gradients: Tensors) -> Tensors:
        check_linear("reducescatter", op)
        factor = prescale_factor * postscale_factor / (size_of(process_set) if op is hvdlite.Average else 1)
        # Each rank's rows are put where they belong, and added: so those of a rank that has joined since are 0.
        placed = [_place(*pair, process_set) for pair in zip(gradients, lengths, strict=True)]
        return [gradient * factor for gradient in allreduce(placed, op=hvdlite.Sum, process_set=process_set)]

    def forward(tensors: Tensors) -> Tensors:
        return hvdlite.reducescatter(tensors, op, name, **options)

    rows: T = differentiable(tensor, forward, backward, compression)
    return rows


def _place(rows: torch.Tensor, length: int, process_set: ProcessSet) -> torch.Tensor:
    """This rank's share of the rows of a tensor of `length` rows, among zeros."""
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
    """Start `reducescatter`; `synchronize` of what this returns waits for the result. `tensor` must not be changed before."""
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
    """`reducescatter` of several tensors at once. Arguments as there; returns a list."""
    return reducescatter(group_of(tensors), name, compression, op, process_set, prescale_factor, postscale_factor)


def grouped_reducescatter_async(
    tensors: Iterable[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = hvdlite.Average,
    process_set: ProcessSet = Everybody,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[torch.Tensor]]:
    """Start `grouped_reducescatter`; `synchronize` of what this returns waits for the list of results."""
    return reducescatter_async(group_of(tensors), name, op, process_set, prescale_factor, postscale_factor)
