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
    """Give every rank the root's tensor. Differentiable.

    The root's gradient is the sum over the ranks of theirs; the others' is 0.

    Args:
        tensor: Of the same shape and dtype on every rank; or a list of tensors.
        root_rank: Whose values to send; its rank in the job, with a process set too.
        name: As in `allreduce`.
        process_set: As in `allreduce`.

    Returns:
        A new tensor like the root's.

    Raises:
        ArgumentError: `root_rank` is not a rank of the set.
        Others: As `allgather`.
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
        # Zeros that are still a function of the sums, for every rank must run the backward pass of this one too.
        return [
            gradient.masked_fill(torch.ones((), dtype=torch.bool, device=gradient.device), 0) for gradient in summed
        ]

    return backward


def broadcast_async(
    tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = Everybody
) -> Handle[T]:
    """Start `broadcast`; `synchronize` of what this returns waits for the result. `tensor` must not be changed before."""
    return hvdlite.broadcast_async(tensor, root_within(process_set, root_rank), name, process_set=process_set)


def broadcast_(tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = Everybody) -> T:
    """Overwrite `tensor` with what `broadcast` returns. For autograd as `allreduce_`.

    Returns:
        `tensor`.
    """
    root = root_within(process_set, root_rank)

    def forward(tensors: Tensors) -> Tensors:
        return hvdlite.broadcast(tensors, root, name, inplace=True, process_set=process_set)

    sent: T = overwriting(tensor, forward, _backward_of_broadcast(root, process_set))
    return sent


def broadcast_async_(
    tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = Everybody
) -> Handle[T]:
    """Start `broadcast_`; after `synchronize` of what this returns, `tensor` is overwritten. As `allreduce_async_`."""
    root = root_within(process_set, root_rank)
    return hvdlite.broadcast_async(overwritten_later(tensor), root, name, inplace=True, process_set=process_set)
