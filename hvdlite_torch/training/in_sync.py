"""A check that all ranks hold the same weights, and a decorator for functions that only rank 0 runs."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import ParamSpec, TypeVar

import numpy as np
import torch

import hvdlite
from hvdlite import ProcessSet
from hvdlite.api import world
from hvdlite.errors import ArgumentError, OutOfSyncError
from hvdlite.ranks.together import ranks_by
from hvdlite_torch.tensors.adapter import ADAPTER
from hvdlite_torch.tensors.sliced import local_of

P = ParamSpec("P")
T = TypeVar("T")
H = TypeVar("H", bound=Hashable)

Named = list[tuple[str, torch.Tensor]]

_DIGEST_BYTES = 16


def assert_in_sync(
    what: torch.nn.Module
    | torch.Tensor
    | Mapping[str, torch.Tensor]
    | Iterable[torch.Tensor | tuple[str, torch.Tensor]],
    process_set: ProcessSet | None = None,
) -> None:
    """Check that all ranks hold the same tensors, bit for bit. Every rank calls this function with its own tensors.

    The ranks exchange a hash of 16 bytes per tensor, so a check costs about as much as reading the tensors, and a program can
    check in every epoch.

    Args:
        what: A model, whose parameters are compared; or ``model.named_parameters()``, or tensors; or ``model.state_dict()``,
            which includes buffers. (The running statistics of a plain batch norm differ between ranks, because each rank sees
            other samples.)
        process_set: The ranks that are compared; None means all ranks.

    Raises:
        OutOfSyncError: A tensor differs. All ranks raise it; the text names the first such tensor and the ranks.
        ArgumentError: `what` contains something that is not a tensor.

    Examples:
        >>> on_ranks(2, lambda: hvd.assert_in_sync({"weight": torch.ones(2)}))
        [None, None]
        >>> def check():
        ...     try:
        ...         hvd.assert_in_sync({"weight": torch.tensor([hvd.rank()])})
        ...     except hvd.OutOfSyncError as error:
        ...         return str(error).partition(".")[0]
        >>> on_ranks(2, check)[0]
        "the ranks do not hold the same tensors: 'weight' (int64, shape (1,)) differs between rank 0 | rank 1"
    """
    named = _named(what)
    layout = [_describe(name, tensor) for name, tensor in named]
    digests = [_digest(tensor) for _, tensor in named]
    own = (hashlib.blake2b(repr(layout).encode()).digest(), b"".join(digests))
    everybody = hvdlite.allgather_object(own, process_set=process_set)
    if all(other == everybody[0] for other in everybody):
        return
    ranks = world().ranks(process_set)
    if len({other for other, _ in everybody}) > 1:
        layouts = hvdlite.allgather_object(layout, process_set=process_set)
        raise OutOfSyncError(_different_layouts(layouts, ranks))
    raise OutOfSyncError(_different_values(layout, [values for _, values in everybody], ranks))


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Return a function that calls `function` on rank 0, and returns None on the other ranks at once.

    Use it for logging and saving. The function must not communicate, because rank 0 would wait for the other ranks.

    Raises:
        NotInitializedError: The returned function is called before `init`.

    Examples:
        >>> @hvd.rank_zero_only
        ... def log(loss):
        ...     print(f"loss {loss}")
        >>> on_ranks(2, log, 0.5)
        loss 0.5
        [None, None]
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if hvdlite.rank() == 0 else None

    return run


def _named(what: object) -> Named:
    if isinstance(what, torch.nn.Module):
        return list(what.named_parameters())
    if isinstance(what, torch.Tensor):
        return [("the tensor", what)]
    if isinstance(what, Mapping):
        what = what.items()
    if not isinstance(what, Iterable):
        raise ArgumentError(f"assert_in_sync: expected a model or tensors; got {type(what).__name__}.")
    named: Named = []
    for number, item in enumerate(what):
        name, tensor = item if isinstance(item, tuple) and len(item) == 2 else (f"tensor {number}", item)
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(
                f"assert_in_sync: expected a model, or tensors, with names or without; {name!r} is a {type(tensor).__name__}."
            )
        named.append((str(name), tensor))
    return named


def _describe(name: str, tensor: torch.Tensor) -> str:
    return f"{name!r} ({str(tensor.dtype).removeprefix('torch.')}, shape {tuple(tensor.shape)})"


def _digest(tensor: torch.Tensor) -> bytes:
    tensor = local_of(tensor.detach()).cpu()
    ADAPTER.info(tensor)  # raises for tensors without plain memory, such as sparse ones
    memory = ADAPTER.to_array(tensor, wide=False).reshape(-1).view(np.uint8)
    return hashlib.blake2b(memory.data, digest_size=_DIGEST_BYTES).digest()


def _groups(values: Sequence[H], ranks: Sequence[int]) -> list[tuple[H, str]]:
    """Return the distinct values, each with the ranks that have it in words; the most frequent value comes first."""
    ordered = sorted(ranks_by(zip(ranks, values, strict=True)).items(), key=lambda item: -len(item[1]))
    return [(value, f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}") for value, who in ordered]


def _different_values(layout: Sequence[str], digests: Sequence[bytes], ranks: Sequence[int]) -> str:
    of_tensor = [
        [values[start : start + _DIGEST_BYTES] for values in digests]
        for start in range(0, len(layout) * _DIGEST_BYTES, _DIGEST_BYTES)
    ]
    different = [number for number, values in enumerate(of_tensor) if len(set(values)) > 1]
    first = different[0]
    groups = " | ".join(who for _, who in _groups(of_tensor[first], ranks))
    return (
        f"the ranks do not hold the same tensors: {layout[first]} differs between {groups}. "
        f"{len(different)} of {len(layout)} tensors differ, this is the first. Start all ranks alike with "
        "hvd.broadcast_parameters(model.state_dict()), and change weights by a distributed optimizer only."
    )


def _different_layouts(layouts: Sequence[Sequence[str]], ranks: Sequence[int]) -> str:
    longest = max(map(len, layouts))
    padded = [[*layout, *["nothing"] * (longest - len(layout))] for layout in layouts]
    first = next(number for number in range(longest) if len({layout[number] for layout in padded}) > 1)
    shown = "; ".join(f"on {who} {text}" for text, who in _groups([layout[first] for layout in padded], ranks))
    return f"the ranks do not have tensors of the same names, dtypes and shapes: number {first} is {shown}."
