"""Allgather: the rows of all ranks, on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch

import hvdlite
from hvdlite import Handle, ProcessSet
from hvdlite.adapter.arguments import Everybody, as_list, group_of
from hvdlite.adapter.rows import starts_of_own_rows
from hvdlite_torch.ops.allreduce import allreduce
from hvdlite_torch.ops.differentiable import Tensors, differentiable

T = TypeVar("T")


def allgather(tensor: T, name: str | None = None, process_set: ProcessSet = Everybody) -> T:
    """Concatenate the ranks' tensors along the first dimension. See `hvdlite.allgather` for arguments, result and errors.

    The function is differentiable: the gradient of `tensor` is the sum, over the ranks, of the gradients of this rank's rows.

    Examples:
        >>> on_ranks(2, lambda: hvd.allgather(torch.full((1 + hvd.rank(),), hvd.rank())).tolist())
        [[0, 1, 1], [0, 1, 1]]
    """
    shapes = [getattr(each, "shape", ()) for each in as_list(tensor)]  # the core refuses what is not a tensor

    def backward(gradients: Tensors) -> Tensors:
        lengths = [shape[0] if shape else 1 for shape in shapes]
        totals = [gradient.shape[0] for gradient in gradients]
        places = starts_of_own_rows(lengths, totals, process_set, "backward pass")
        summed = allreduce(gradients, op=hvdlite.Sum, process_set=process_set)
        return [
            gradient.narrow(0, start, length).reshape(shape)
            for gradient, start, length, shape in zip(summed, places, lengths, shapes, strict=True)
        ]

    def forward(tensors: Tensors) -> Tensors:
        return hvdlite.allgather(tensors, name, process_set=process_set)

    gathered: T = differentiable(tensor, forward, backward)
    return gathered


def allgather_async(tensor: T, name: str | None = None, process_set: ProcessSet = Everybody) -> Handle[T]:
    """Start `allgather` and return a handle; `synchronize` waits for its result. `tensor` must not be changed before."""
    return hvdlite.allgather_async(tensor, name, process_set=process_set)


def grouped_allgather(
    tensors: Iterable[torch.Tensor], name: str | None = None, process_set: ProcessSet = Everybody
) -> list[torch.Tensor]:
    """Run `allgather` on several tensors of any dtypes as one operation. Return the list of results. See `allgather`.

    Examples:
        >>> def gathered():
        ...     both = hvd.grouped_allgather([torch.tensor([hvd.rank()]), torch.tensor([0.5])])
        ...     return [each.tolist() for each in both]
        >>> on_ranks(2, gathered)
        [[[0, 1], [0.5, 0.5]], [[0, 1], [0.5, 0.5]]]
    """
    return allgather(group_of(tensors), name, process_set)


def grouped_allgather_async(
    tensors: Iterable[torch.Tensor], name: str | None = None, process_set: ProcessSet = Everybody
) -> Handle[list[torch.Tensor]]:
    """Start `grouped_allgather` and return a handle; `synchronize` waits for its list of results."""
    return allgather_async(group_of(tensors), name, process_set)
