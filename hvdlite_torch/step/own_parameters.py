"""Other weights for a while, on one rank: to evaluate with averaged ones, or to look at those of a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, MutableMapping

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hvdlite.errors import ArgumentError

_held: dict[int, torch.Tensor] = {}
"""Parameters that are within a body now, by their ``id``. Usually none, which a step sees at once."""

_changes: MutableMapping[torch.Tensor, int] = WeakIdKeyDictionary()
"""How often parameters were changed in place within bodies."""


@contextlib.contextmanager
def own_parameters(model: torch.nn.Module | Iterable[torch.Tensor]) -> Iterator[None]:
    """For a with statement: within it the parameters lie in memory of this rank alone, and may be overwritten.

    Of an optimizer with ``shard=True`` the parameters of all ranks of a host are one memory, so a rank that loads other weights
    changes those of all. Within the body it changes its own only; at its end the parameters are again what they are on all
    ranks, whatever the body has done to them::

        with hvd.own_parameters(model):
            model.load_state_dict(averaged)
            evaluate(model)

    Ranks may do this at different times, or not at all. Without ``shard=True`` it does the same. Buffers, such as running
    statistics, are each rank's own in any case, and stay what the body makes of them. The parameters take twice the memory.

    Args:
        model: Or some of its parameters.

    Raises:
        ArgumentError: They are in the body of another such statement, or a step is taken within the body: it would be lost.
    """
    given = model.parameters() if isinstance(model, torch.nn.Module) else model
    parameters = list({id(parameter): parameter for parameter in given}.values())
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
    """How often each parameter was changed in place, outside of such bodies."""
    if not _changes:
        return [parameter._version for parameter in parameters]
    return [parameter._version - _changes.get(parameter, 0) for parameter in parameters]


def refuse_steps(optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer is about to step parameters that are within a body.

    Raises:
        ArgumentError: It is.
    """
    if _held and any(id(parameter) in _held for group in optimizer.param_groups for parameter in group["params"]):
        raise ArgumentError(
            "optimizer.step() within hvd.own_parameters(): the step would be lost at the end of the with statement. Train "
            "outside of it."
        )
