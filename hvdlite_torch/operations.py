"""The blocking operations as differentiable functions of torch.

The gradient of an operation is an operation too, so every rank must run its backward pass. Forms in place and
asynchronous ones are not differentiable, and are the core's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import hvdlite
from hvdlite import ProcessSet, ReduceOp
from hvdlite.api import world
from hvdlite.errors import HvdliteError

Tensors = list[torch.Tensor]


class _Differentiable(torch.autograd.Function):
    """An operation on tensors whose gradient is `backward` of the gradients of its results."""

    @staticmethod
    def forward(
        ctx: Any, forward: Callable[[Tensors], Tensors], backward: Callable[[Tensors], Tensors], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.backward_of_results = backward
        return tuple(forward(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *ctx.backward_of_results([gradient.contiguous() for gradient in gradients]))


def _apply(given: Any, forward: Callable[[Tensors], Tensors], backward: Callable[[Tensors], Tensors]) -> Any:
    """Run `forward` on one tensor or a list; recorded for autograd only where something wants a gradient."""
    tensors = _list(given)
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        results: Sequence[torch.Tensor] = _Differentiable.apply(forward, backward, *tensors)  # type: ignore[no-untyped-call]
    else:
        results = forward(tensors)
    return list(results) if isinstance(given, list | tuple) else results[0]


def _list(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def allreduce(
    tensor: Any,
    op: ReduceOp = hvdlite.Average,
    name: str | None = None,
    *,
    inplace: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    algorithm: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """As `hvdlite.allreduce`; differentiable for Sum and Average unless `inplace`.

    The gradient is the same allreduce of the ranks' gradients: that of the sum of all ranks' losses, for Sum.
    """
    options: dict[str, Any] = {
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "algorithm": algorithm,
        "process_set": process_set,
    }
    if inplace:
        return hvdlite.allreduce(tensor, op, name, inplace=True, **options)

    def backward(gradients: Tensors) -> Tensors:
        _check_linear("allreduce", op)
        return hvdlite.allreduce(gradients, op, **options)

    return _apply(tensor, lambda tensors: hvdlite.allreduce(tensors, op, name, **options), backward)


def allgather(tensor: Any, name: str | None = None, *, process_set: ProcessSet | None = None) -> Any:
    """As `hvdlite.allgather`; differentiable: the gradient is the sum over the ranks of that of this rank's rows."""
    shapes = [each.shape for each in _list(tensor)]

    def backward(gradients: Tensors) -> Tensors:
        rank = _rank(process_set)
        rows = hvdlite.allgather([torch.tensor(shape[0] if shape else 1) for shape in shapes], process_set=process_set)
        summed = hvdlite.allreduce(gradients, hvdlite.Sum, process_set=process_set)
        return [
            torch.split(gradient, counts.tolist())[rank].reshape(shape)
            for gradient, counts, shape in zip(summed, rows, shapes, strict=True)
        ]

    return _apply(tensor, lambda tensors: hvdlite.allgather(tensors, name, process_set=process_set), backward)


def _rank(process_set: ProcessSet | None) -> int:
    return world().engine(process_set).rank


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    *,
    inplace: bool = False,
    process_set: ProcessSet | None = None,
) -> Any:
    """As `hvdlite.broadcast`; differentiable unless `inplace`: the root's gradient is the sum over the ranks, the others' 0."""
    if inplace:
        return hvdlite.broadcast(tensor, root_rank, name, inplace=True, process_set=process_set)

    def backward(gradients: Tensors) -> Tensors:
        rank = _rank(process_set)
        summed = hvdlite.allreduce(gradients, hvdlite.Sum, process_set=process_set)
        return summed if rank == root_rank else [torch.zeros_like(gradient) for gradient in summed]

    return _apply(
        tensor, lambda tensors: hvdlite.broadcast(tensors, root_rank, name, process_set=process_set), backward
    )


def alltoall(tensor: Any, splits: Any = None, name: str | None = None, *, process_set: ProcessSet | None = None) -> Any:
    """As `hvdlite.alltoall`; differentiable: the gradients take the way back."""
    received: list[torch.Tensor] = []

    def forward(tensors: Tensors) -> Tensors:
        results: Any = hvdlite.alltoall(tensors, splits, name, process_set=process_set)
        if splits is None:
            return list(results)
        received.extend(counts for _, counts in results)
        return [rows for rows, _ in results]

    def backward(gradients: Tensors) -> Tensors:
        sent = [_even(each, process_set) if splits is None else torch.as_tensor(splits) for each in _list(tensor)]
        back = hvdlite.alltoall(sent, process_set=process_set)
        return [
            hvdlite.alltoall(gradient, counts, process_set=process_set)[0]
            for gradient, counts in zip(gradients, back, strict=True)
        ]

    rows = _apply(_list(tensor), forward, backward)
    results = rows if splits is None else list(zip(rows, received, strict=True))
    return results if isinstance(tensor, list | tuple) else results[0]


def _even(tensor: torch.Tensor, process_set: ProcessSet | None) -> torch.Tensor:
    size = world().engine(process_set).size
    return torch.full((size,), tensor.shape[0] // size)


def reducescatter(
    tensor: Any,
    op: ReduceOp = hvdlite.Average,
    name: str | None = None,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Any:
    """As `hvdlite.reducescatter`; differentiable for Sum and Average: each rank's gradient is that of all ranks' rows."""
    options: dict[str, Any] = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}

    def backward(gradients: Tensors) -> Tensors:
        _check_linear("reducescatter", op)
        factor = prescale_factor * postscale_factor
        if op is hvdlite.Average:
            factor /= world().engine(process_set).size
        return [gradient * factor for gradient in hvdlite.allgather(gradients, process_set=process_set)]

    return _apply(
        tensor, lambda tensors: hvdlite.reducescatter(tensors, op, name, process_set=process_set, **options), backward
    )


def _check_linear(call: str, op: ReduceOp) -> None:
    if op not in (hvdlite.Sum, hvdlite.Average):
        raise HvdliteError(f"{call} is differentiable for Sum and Average, not for {op!r}: detach() its input.")
