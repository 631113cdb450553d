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
    """Send some rows to each rank, and receive some from each. See `hvdlite.alltoall` for arguments, result and errors.

    The function is differentiable: an alltoall sends the gradients of the rows back to the rows' senders. It takes one tensor,
    not a list.

    Examples:
        >>> on_ranks(2, lambda: hvd.alltoall(torch.tensor([10, 11]) + 10 * hvd.rank()).tolist())
        [[10, 20], [11, 21]]
        >>> def by_splits():
        ...     rows, counts = hvd.alltoall(torch.tensor([1, 2, 3]) + 10 * hvd.rank(), splits=[2, 1])
        ...     return rows.tolist(), counts.tolist()
        >>> on_ranks(2, by_splits)
        [([1, 2, 11, 12], [2, 2]), ([3, 13], [1, 1])]
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
    """Start `alltoall` and return a handle; `synchronize` waits for a pair, also where `splits` is None.

    The pair is the rows received and the numbers of rows by sender (int32). `tensor` must not be changed before.
    """
    return hvdlite.alltoall_async(tensor, _all_splits(tensor, splits, process_set), name, process_set=process_set)


def _all_splits(tensor: Any, splits: Splits, process_set: ProcessSet) -> Any:
    """Return `splits`, or equal numbers if it is None: the core returns the numbers of received rows only if it gets splits."""
    if isinstance(tensor, list | tuple):
        raise ArgumentError(f"alltoall takes one tensor; got a {type(tensor).__name__}. hvdlite.alltoall takes lists.")
    size = size_of(process_set)
    shape = getattr(tensor, "shape", ())
    if splits is not None or not shape or shape[0] % size:  # the core refuses rows that cannot be divided
        return splits
    return [shape[0] // size] * size
