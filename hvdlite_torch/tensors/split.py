"""Who has which parameters of a model that is split over ranks. Whatever looks across parameters asks here.

A model is split in two ways. Of a sliced parameter (`hvdlite_torch.tensors.sliced`) each rank of a mesh has a part, which its
`DTensor` says. Of a model in stages, such as a `Pipeline`, each rank of a process set has some whole parameters: their `Stages`
are noted here. A norm, an infinity, a state is that of the whole model only if it is joined over both axes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hvdlite.adapter.pipeline.stages import StageRanks as AnyStages
from hvdlite.ranks.process_set import ProcessSet
from hvdlite_torch.tensors import sliced
from hvdlite_torch.tensors.sliced import is_sliced, local_of

_lock = threading.Lock()
_stages: MutableMapping[torch.Tensor, tuple[Stages, str]] = WeakIdKeyDictionary()
"""For each parameter of a model in stages, its stages, and its name in the model."""
_copies: MutableMapping[torch.Tensor, None] = WeakIdKeyDictionary()
"""The tied parameters of a stage that another stage has too, which counts their gradients."""


class Stages(AnyStages):
    """A model whose layers are on different ranks. Its parameters on this rank are noted as those of a stage.

    Args:
        kind: What the program has made, such as "Pipeline", for messages.
        process_set: The ranks that have the model together.
        own: The parameters of this rank, by the names that they have in the model.
        names: The names of the parameters of all ranks, in the order in which the model has them.
        sparse: Those names whose gradients will be sparse.
        copies: Those of this rank that another one has too, and counts in what is joined.

    Attributes:
        kind, process_set, names, sparse: The arguments.
    """

    def __init__(
        self,
        kind: str,
        process_set: ProcessSet,
        own: Mapping[str, torch.Tensor],
        names: Iterable[str],
        sparse: Iterable[str] = (),
        copies: Iterable[torch.Tensor] = (),
    ) -> None:
        super().__init__(kind, process_set)
        self.names, self.sparse = tuple(names), tuple(sparse)
        with _lock:
            for name, parameter in own.items():
                _stages[parameter] = self, name
            for parameter in copies:
                _copies[parameter] = None


def any_stages() -> bool:
    """Return whether there is a model in stages in this process."""
    return bool(_stages)


def stages_of(parameter: torch.Tensor) -> Stages | None:
    """Return the stages of which a parameter is a part; None if all ranks have it."""
    found = _stages.get(parameter) if _stages else None
    return None if found is None else found[0]


def name_of(parameter: torch.Tensor) -> str | None:
    """Return the name of a parameter in the whole model, if it is one of a stage."""
    found = _stages.get(parameter) if _stages else None
    return None if found is None else found[1]


def all_stages(parameters: Iterable[torch.Tensor]) -> list[Stages]:
    """Return the models in stages that have some of these parameters, in an order that is the same on all of their ranks."""
    if not _stages:
        return []
    found = {each.number: each for parameter in parameters if (each := stages_of(parameter)) is not None}
    return [found[number] for number in sorted(found)]


def by_stages(parameters: Sequence[torch.Tensor]) -> list[tuple[Stages | None, list[int]]]:
    """Return for each model in stages the numbers of its parameters; first those of none. See `all_stages` for the order."""
    if not _stages:
        return [(None, list(range(len(parameters))))]
    of = [stages_of(parameter) for parameter in parameters]
    kinds = [None, *all_stages(parameters)]
    return [(kind, [number for number, each in enumerate(of) if each is kind]) for kind in kinds]


def gradients_of_stages(gradients: Sequence[torch.Tensor]) -> list[tuple[Stages | None, list[torch.Tensor]]]:
    """Return gradients, apart by the stages whose parameters have them; first those of no stages.

    A tied parameter that several stages have is there on one of them only, though all of them are named.
    """
    if not _stages or not gradients:
        return [(None, list(gradients))]
    with _lock:
        of = {id(p.grad): found for p, (found, _) in _stages.items() if p.grad is not None}
        again = {id(p.grad) for p in _copies}
    found = [of.get(id(gradient)) for gradient in gradients]
    parts: dict[int, tuple[Stages | None, list[torch.Tensor]]] = {}
    for gradient, stages in zip(gradients, found, strict=True):
        part = parts.setdefault(-1 if stages is None else stages.number, (stages, []))[1]
        if id(gradient) not in again:
            part.append(gradient)
    return [parts[number] for number in sorted(parts)]


def is_split(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether other ranks have other slices, or other stages, of the model of these parameters."""
    return any(map(is_sliced, parameters)) or bool(all_stages(parameters))


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, as the program has them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# What must be joined


def joint_squares(parameters: Sequence[torch.Tensor], squares_of: Callable[[Sequence[int]], float]) -> float:
    """Return the sum of the squares of all gradients, over all slices and stages. All ranks that have some call this.

    Args:
        parameters: The parameters of this rank.
        squares_of: Returns the sum of the squares of the gradients of the parameters with these numbers: of this rank's slices.
    """
    total = 0.0
    for stages, numbers in by_stages(parameters):
        numbers = [number for number in numbers if parameters[number] not in _copies]
        own = sliced.joint_squares(
            [parameters[number] for number in numbers],
            lambda some, numbers=numbers: squares_of([numbers[place] for place in some]),  # type: ignore[misc]
        )
        total += own if stages is None else stages.sum(own, "the norm of the gradients")
    return total


def join_count(parameters: Sequence[torch.Tensor], count: torch.Tensor) -> None:
    """Overwrite a count, such as of infinities, with the sum over the ranks that have other slices or stages of a model.

    All ranks that have some call this. A parameter that several ranks have is counted by each.

    Args:
        parameters: The parameters of this rank.
        count: The count on this rank, of shape ``()``.
    """
    for mesh, axes in dict.fromkeys(map(sliced.axes_of, parameters)):
        for axis in axes:
            torch.distributed.all_reduce(count, group=mesh.get_group(axis))
    for stages in all_stages(parameters):
        count.fill_(stages.sum(float(count), "the infinities that a GradScaler has found"))


def check_apart(tensors: Sequence[torch.Tensor], ranks: Collection[int], own: int) -> None:
    """Raise an error if ranks that exchange tensors have different parts of a model: slices of one tensor, or stages.

    Args:
        tensors: The tensors: parameters, or what shares their memory.
        ranks: The world ranks that exchange them.
        own: This rank.

    Raises:
        ArgumentError: The text says which ranks have different parts, and which process set to pass.
    """
    sliced.check_apart(tensors, ranks, own)
    for found, name in _stages_by_memory(tensors):
        found.check_apart(name, ranks, own)


def _stages_by_memory(tensors: Sequence[torch.Tensor]) -> list[tuple[Stages, str]]:
    """Return the stages, and the name, of those tensors that are parameters of a stage or have the memory of one.

    The tensors of a state dict are not the parameters, but have their memory.
    """
    if not _stages or not tensors:
        return []
    with _lock:
        known = {local_of(parameter).data_ptr(): found for parameter, found in _stages.items()}
    pointers = (local_of(tensor).data_ptr() for tensor in tensors if tensor.layout is torch.strided)
    return [known[pointer] for pointer in pointers if pointer and pointer in known]
