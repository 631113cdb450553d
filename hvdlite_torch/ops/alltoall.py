"""Alltoall: each rank sends some rows to each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

import hvdlite
from hvdlite import Handle, ProcessSet
from hvdlite.adapter.arguments import Everybody, size_of
from hvdlite.errors import ArgumentError
from hvdlite_torch.ops.differentiable import Tensors, differentiable

Splits = torch.Tensor | Sequence[int] | None


@overload
def alltoall(
    tensor: torch.Tensor, splits: None = None, name: str | None = None, process_set: ProcessSet = Everybody
) -> torch.Tensor: ...


@overload
def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int],
    name: str | None = None,
    process_set: ProcessSet = Everybody,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def alltoall(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = Everybody
) -> Any:
    """Send a slice of the rows to each rank, and receive one from each. Differentiable: the gradients take the way back.

    Args:
        tensor: At least 1-d; the first dimension may differ between ranks.
        splits: For each rank, how many rows it gets (whole numbers that add up to the first dimension); equal shares if None.
        name: As in `allreduce`.
        process_set: As in `allreduce`.

    Returns:
        The rows received, in the order of their senders. With `splits`, a pair of these and how many came from each rank
        (an int32 tensor with as many elements as there are ranks).

    Raises:
        ArgumentError: `splits` does not fit.
        Others: As `allgather`.
    """
    counts = _all_splits(tensor, splits, process_set)
    received: torch.Tensor | None = None

    def forward(tensors: Tensors) -> Tensors:
        nonlocal received
        rows, received = hvdlite.alltoall(tensors[0], counts, name, process_set=process_set)
        return [rows]

    def backward(gradients: Tensors) -> Tensors:
        return [alltoall(gradients[0], received, process_set=process_set)[0]]

    rows = differentiable(tensor, forward, backward)
    return rows if splits is None else (rows, received)


def alltoall_async(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = Everybody
) -> Handle[tuple[torch.Tensor, torch.Tensor]]:
    """Start `alltoall`; `synchronize` of what this returns waits for the pair of rows and counts, without `splits` too.

    `tensor` must not be changed before.
    """
    return hvdlite.alltoall_async(tensor, _all_splits(tensor, splits, process_set), name, process_set=process_set)


def _all_splits(tensor: Any, splits: Splits, process_set: ProcessSet) -> Any:
    """`splits`, or equal shares in numbers: the core says how many rows came from each rank only where it was given some."""
    if isinstance(tensor, list | tuple):
        raise ArgumentError(f"alltoall takes one tensor; got a {type(tensor).__name__}. hvdlite.alltoall takes lists.")
    size = size_of(process_set)
    shape = getattr(tensor, "shape", ())
    if splits is not None or not shape or shape[0] % size:  # what cannot be divided is the core's to refuse
        return splits
    return [shape[0] // size] * size
