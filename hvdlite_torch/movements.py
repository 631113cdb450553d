"""Operations that move the ranks' tensors as they are: allgather, broadcast and alltoall, in all their forms.

The names, and the order and defaults of the arguments, are Horovod's. Blocking forms that return a new tensor are
differentiable, and so are those in place. Asynchronous ones are not, and take tensors that require a gradient as they take
others.
Gradients are those of the sum of all ranks' losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, overload

import torch

import hvdlite
from hvdlite import Handle, ProcessSet
from hvdlite.arguments import as_list, group_of, rank_in, root_within, size_of
from hvdlite.errors import ArgumentError
from hvdlite_torch.differentiable import Exchange, Tensors, differentiable, overwriting, overwritten_later
from hvdlite_torch.reductions import allreduce

T = TypeVar("T")
Everybody = hvdlite.global_process_set
Splits = torch.Tensor | Sequence[int] | None


def allgather(tensor: T, name: str | None = None, process_set: ProcessSet = Everybody) -> T:
    """Concatenate the ranks' tensors along the first dimension. Differentiable.

    The gradient is the sum over the ranks of that of this rank's rows.

    Args:
        tensor: The first dimension may differ between ranks and may be 0; the others and the dtype are the same. Scalars count
            as vectors of one. Or a list of tensors.
        name: As in `allreduce`.
        process_set: As in `allreduce`.

    Returns:
        The rows of all ranks in rank order, on every rank.

    Raises:
        UnsupportedTensorError: `tensor` is none.
        MismatchError: The ranks' calls do not belong together; raised on all of them.
        DuplicateNameError: `name` is in flight.
    """
    shapes = [getattr(each, "shape", ()) for each in as_list(tensor)]  # what is no tensor is the core's to refuse

    def backward(gradients: Tensors) -> Tensors:
        lengths = [shape[0] if shape else 1 for shape in shapes]
        places = _starts(lengths, [gradient.shape[0] for gradient in gradients], process_set)
        summed = allreduce(gradients, op=hvdlite.Sum, process_set=process_set)
        return [
            gradient.narrow(0, start, length).reshape(shape)
            for gradient, start, length, shape in zip(summed, places, lengths, shapes, strict=True)
        ]

    def forward(tensors: Tensors) -> Tensors:
        return hvdlite.allgather(tensors, name, process_set=process_set)

    gathered: T = differentiable(tensor, forward, backward)
    return gathered


def _starts(lengths: list[int], totals: list[int], process_set: ProcessSet) -> list[int]:
    """Where this rank's rows begin in each gathered tensor, of which this rank has `lengths` rows and all have `totals`."""
    rank = rank_in(process_set)
    # Each row says whose it is, for ranks that have joined send none.
    table = hvdlite.allgather(torch.tensor([[rank, *lengths]]), process_set=process_set)
    if table[:, 1:].sum(0).tolist() != totals:
        raise ArgumentError("a rank joined between an allgather and its backward pass: join after the backward pass.")
    starts: list[int] = table[table[:, 0] < rank, 1:].sum(0).tolist()
    return starts


def allgather_async(tensor: T, name: str | None = None, process_set: ProcessSet = Everybody) -> Handle[T]:
    """Start `allgather`; `synchronize` of what this returns waits for the result. `tensor` must not be changed before."""
    return hvdlite.allgather_async(tensor, name, process_set=process_set)


def grouped_allgather(
    tensors: Iterable[torch.Tensor], name: str | None = None, process_set: ProcessSet = Everybody
) -> list[torch.Tensor]:
    """`allgather` of several tensors at once, of any dtypes and shapes. Arguments as there; returns a list."""
    return allgather(group_of(tensors), name, process_set)


def grouped_allgather_async(
    tensors: Iterable[torch.Tensor], name: str | None = None, process_set: ProcessSet = Everybody
) -> Handle[list[torch.Tensor]]:
    """Start `grouped_allgather`; `synchronize` of what this returns waits for the list of results."""
    return allgather_async(group_of(tensors), name, process_set)


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
