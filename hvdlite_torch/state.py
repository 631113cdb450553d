"""The same start on every rank: parameters and optimizer state of one rank for all."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch

import hvdlite
from hvdlite import ProcessSet
from hvdlite.api import world
from hvdlite.errors import ArgumentError
from hvdlite_torch.optimizer import Sharded


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0, *, process_set: ProcessSet | None = None
) -> None:
    """Overwrite the tensors of every rank with the root's, in place.

    Args:
        params: ``model.state_dict()`` or ``model.named_parameters()``.
        root_rank: Whose values everybody gets; its number within `process_set`.
        process_set: The ranks that take part; all by default.

    Raises:
        ArgumentError: `params` has something else in it.
        MismatchError: The ranks have different tensors.
    """
    items = sorted((params.items() if isinstance(params, Mapping) else params), key=lambda item: item[0])
    tensors = []
    for name, value in items:
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(
                f"expected tensors by name, as model.state_dict() has them; {name!r} is a {type(value).__name__}."
            )
        tensors.append(value)
    hvdlite.broadcast(tensors, root_rank, inplace=True, process_set=process_set)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, *, process_set: ProcessSet | None = None
) -> None:
    """Give every rank's optimizer the state and the settings (learning rate, …) of the root's.

    Works at any time: no step is taken to create state that is not there yet, nor is the root's touched.

    Args:
        optimizer: Over the same parameters on every rank.
        root_rank: Whose state everybody gets; its number within `process_set`.
        process_set: The ranks that take part; all by default.
    """
    rank = world().engine(process_set).rank
    tensors: list[torch.Tensor] = []
    message = None
    # Of a sharded optimizer each rank has a share, and all of them are needed to see the state.
    state = optimizer.state_dict() if rank == root_rank or isinstance(optimizer, Sharded) else None
    if rank == root_rank:
        buffer = io.BytesIO()
        _Pickler(buffer, tensors).dump(state)
        message = (buffer.getvalue(), [(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
    skeleton, layout = hvdlite.broadcast_object(message, root_rank, process_set=process_set)  # type: ignore[misc]
    if rank == root_rank:
        tensors = [tensor.detach().contiguous() for tensor in tensors]
    else:
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in layout]
    hvdlite.broadcast(tensors, root_rank, inplace=True, process_set=process_set)
    if rank != root_rank or isinstance(optimizer, Sharded):
        optimizer.load_state_dict(_Unpickler(io.BytesIO(skeleton), tensors).load())


class _Pickler(pickle.Pickler):
    """Pickles an object without its tensors, which it collects."""

    def __init__(self, buffer: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        self._tensors.append(obj)
        return len(self._tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Puts the tensors back in."""

    def __init__(self, buffer: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(buffer)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]
