"""Broadcast: one rank's tensor on all ranks."""

from __future__ import annotations

from typing import TypeVar

import torch

import hvdlite
from hvdlite import Handle, ProcessSet
from hvdlite.adapter.arguments import Everybody, rank_in, root_within
from hvdlite_torch.ops.allreduce import allreduce
from hvdlite_torch.ops.differentiable import Exchange, Tensors, differentiable, overwriting, overwritten_later

T = TypeVar("T")


def broadcast(tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = Everybody) -> T:
    """Give every rank the root's tensor. See `hvdlite.broadcast` for the other arguments, the result and the errors.

    The function is differentiable: the root's gradient is the sum of all ranks' gradients, and the gradient of the other ranks
    is 0.

    Args:
        root_rank: The rank in the job of the root, also with a process set. (`hvdlite.broadcast` takes the rank in the set.)

    Examples:
        >>> on_ranks(2, lambda: hvd.broadcast(torch.tensor([hvd.rank()]), root_rank=1).tolist())
        [[1], [1]]
    """
    root = root_within(process_set, root_rank)

    def forward(tensors: Tensors) -> Tensors:
        return hvdlite.broadcast(tensors, root, name, process_set=process_set)

    sent: T = differentiable(tensor, forward, _backward_of_broadcast(root, process_set))
    return sent


def _backward_of_broadcast(root: int, process_set: ProcessSet) -> Exchange:
    def backward(gradients: Tensors) -> Tensors:
        summed = allreduce(gradients, op=hvdlite.Sum, process_set=process_set)
        if rank_in(process_set) == root:
            return summed
        # These zeros are still a function of the sums, because every rank must run the backward pass of this sum too.
        return [
            gradient.masked_fill(torch.ones((), dtype=torch.bool, device=gradient.device), 0) for gradient in summed
        ]

    return backward


def broadcast_async(
    tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = Everybody
) -> Handle[T]:
    """Start `broadcast` and return a handle; `synchronize` waits for its result. `tensor` must not be changed before."""
    return hvdlite.broadcast_async(tensor, root_within(process_set, root_rank), name, process_set=process_set)


def broadcast_(tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = Everybody) -> T:
    """Overwrite `tensor` with what `broadcast` returns, and return `tensor`. Autograd records it like `allreduce_`.

    Examples:
        >>> def overwritten():
        ...     tensor = torch.tensor([hvd.rank()])
        ...     hvd.broadcast_(tensor, root_rank=1)
        ...     return tensor.tolist()
        >>> on_ranks(2, overwritten)
        [[1], [1]]
    """
    root = root_within(process_set, root_rank)

    def forward(tensors: Tensors) -> Tensors:
        return hvdlite.broadcast(tensors, root, name, inplace=True, process_set=process_set)

    sent: T = overwriting(tensor, forward, _backward_of_broadcast(root, process_set))
    return sent


def broadcast_async_(
    tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = Everybody
) -> Handle[T]:
    """Start `broadcast_` and return a handle; `tensor` has the result when `synchronize` has returned.

    Raises:
        UnsupportedTensorError: Autograd would have to record this change of `tensor`, and cannot.
    """
    root = root_within(process_set, root_rank)
    return hvdlite.broadcast_async(overwritten_later(tensor), root, name, inplace=True, process_set=process_set)
