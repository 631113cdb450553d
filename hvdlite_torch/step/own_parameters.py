"""`own_parameters` gives one rank other weights for a while, to evaluate averaged weights or those of a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, MutableMapping

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hvdlite.errors import ArgumentError
from hvdlite_torch.tensors.sliced import local_of

_held: dict[int, torch.Tensor] = {}
"""The parameters, by their ``id``, for which an `own_parameters` statement is active. A step sees at once if it is empty."""

_changes: MutableMapping[torch.Tensor, int] = WeakIdKeyDictionary()
"""How often each parameter was changed in place within such statements."""


@contextlib.contextmanager
def own_parameters(model: torch.nn.Module | Iterable[torch.Tensor]) -> Iterator[None]:
    """Return a context manager: in its body the parameters lie in memory of this rank alone, and may be overwritten.

    With ``shard=True`` the parameters of all ranks of a host are one memory, so a rank that loads other weights changes them
    for all ranks. Within the statement a rank changes its own copy only. At the end the parameters have again the values that
    they have on all ranks, whatever was done to the copy::

        with hvd.own_parameters(model):
            model.load_state_dict(averaged)
            evaluate(model)

    Ranks may do this at different times, or not at all. Without ``shard=True`` the effect is the same. Buffers, such as running
    statistics, belong to each rank in any case, and keep their changes. The parameters take twice the memory.

    Args:
        model: A model, or some of its parameters.

    Raises:
        ArgumentError: Another such statement is active for one of the parameters. A step within the statement raises it too,
            because the step would be lost.

    Examples:
        >>> layer = torch.nn.Linear(1, 1)
        >>> weight = torch.nn.init.ones_(layer.weight)
        >>> with hvd.own_parameters(layer):
        ...     within = torch.nn.init.zeros_(layer.weight).item()
        >>> within, layer.weight.item()
        (0.0, 1.0)
    """
    given = model.parameters() if isinstance(model, torch.nn.Module) else model
    parameters = list({id(parameter): parameter for parameter in map(local_of, given)}.values())
    if any(id(parameter) in _held for parameter in parameters):
        raise ArgumentError("own_parameters: these parameters are this rank's own already, by another such statement.")
    shared = [(parameter.data, parameter._version) for parameter in parameters]
    _held.update({id(parameter): parameter for parameter in parameters})
    try:
        for parameter in parameters:
            parameter.data = parameter.data.clone()
        yield
    finally:
        for parameter, (memory, version) in zip(parameters, shared, strict=True):
            parameter.data = memory
            _changes[parameter] = _changes.get(parameter, 0) + parameter._version - version
            del _held[id(parameter)]


def versions_of(parameters: Iterable[torch.Tensor]) -> list[int]:
    """Return how often each parameter was changed in place, outside of `own_parameters` statements."""
    if not _changes:
        return [parameter._version for parameter in parameters]
    return [parameter._version - _changes.get(parameter, 0) for parameter in parameters]


def refuse_steps(optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer is about to step parameters for which `own_parameters` is active.

    Raises:
        ArgumentError: The step would be lost.
    """
    if _held and any(id(local_of(p)) in _held for group in optimizer.param_groups for p in group["params"]):
        raise ArgumentError(
            "optimizer.step() within hvd.own_parameters(): the step would be lost at the end of the with statement. Train "
            "outside of it."
        )
