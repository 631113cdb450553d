"""Cuts a model into stages, and keeps those of this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

import hvdlite
from hvdlite.errors import ArgumentError
from hvdlite_torch.checks.plain import hooks_of, is_plain_sequential
from hvdlite_torch.pipeline.costs import balance, measure
from hvdlite_torch.pipeline.faithful import refuse_hooks_within
from hvdlite_torch.pipeline.passes import Call, call_of
from hvdlite_torch.pipeline.tied import Shared, SharedBuffers, shared_parameters
from hvdlite_torch.pipeline.traced import Inputs, trace


class Layers(nn.Module):
    """Some layers of an ``nn.Sequential``, under the names that they have there."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Any) -> Any:
        first, *others = children(self).values()
        value = first(*inputs)
        for layer in others:  # they pass on tuples as they are
            value = layer(value)
        return value


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers with which a stage may begin: the children of a Sequential, or the items of lists within a model."""
    if isinstance(model, nn.Sequential):
        return children(model)
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList | nn.Sequential) and not inside:
            found |= {f"{name}.{item}": child for item, child in children(module).items()}
    return found


def children(module: nn.Module) -> dict[str, nn.Module]:
    """Return the children by name. `named_children` leaves out a layer that is there a second time, such as an activation."""
    return {name: child for name, child in module._modules.items() if child is not None}


def settle_cuts(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    count: int,
    cuts: Sequence[str] | None,
    example: tuple[Any, ...] | None,
    keywords: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the names of the layers with which the stages but the first begin, the same on all ranks.

    Args:
        model: The whole model.
        layers: The layers with which a stage may begin, by name.
        count: The number of stages.
        cuts: What the program has given, which is checked; None measures the layers. Then all ranks of the job call this, and
            rank 0's times decide.
        example, keywords: The inputs by which the layers are measured.

    Raises:
        ArgumentError: The cuts are wrong, or cannot be measured. Raised on all ranks alike.
    """
    if cuts is None:
        cuts = hvdlite.broadcast_object(_measured_cuts(model, layers, count, example, keywords or {}), 0)
    _check_cuts(list(layers), cuts, count)
    return list(cuts)


def _measured_cuts(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    count: int,
    example: tuple[Any, ...] | None,
    keywords: Mapping[str, Any],
) -> list[str]:
    if example is None:
        raise ArgumentError(
            "give `cuts`, the names of the layers with which the stages but the first begin, or `example`, the "
            "inputs by which the layers are measured."
        )
    if len(layers) < count:
        raise ArgumentError(
            f"{count} stages need at least {count} layers; {type(model).__name__} has {len(layers)} that can begin a "
            f"stage ({', '.join(layers) or 'none'}): the children of an nn.Sequential, or the items of lists within a model."
        )
    if count == 1:
        return []
    costs = measure(model, layers, example, keywords)
    names = list(costs)
    has_parameters = [any(True for _ in layers[name].parameters()) for name in names]
    if sum(has_parameters) < count:
        raise ArgumentError(
            f"{count} stages need at least {count} layers with parameters; {type(model).__name__} has "
            f"{sum(has_parameters)}. Use fewer ranks for the pipeline."
        )
    return [names[cut] for cut in balance(list(costs.values()), count, has_parameters)]


def _check_cuts(layers: Sequence[str], cuts: Sequence[str], count: int) -> None:
    unknown = [cut for cut in cuts if cut not in layers]
    in_order = not unknown and [layers.index(cut) for cut in cuts] == sorted({layers.index(cut) for cut in cuts})
    if len(cuts) != count - 1 or not in_order or (layers and layers[0] in cuts):
        raise ArgumentError(
            f"cuts={list(cuts)}: expected the names of {count - 1} layers, in order and without the first one, for "
            f"{count} stages; the layers are {', '.join(layers)}."
        )


def make_stages(
    model: nn.Module,
    cuts: Sequence[str],
    own: Sequence[int],
    example: tuple[Any, ...] | None,
    keywords: Mapping[str, Any],
) -> tuple[dict[int, tuple[nn.Module, Call]], list[Shared], SharedBuffers]:
    """Return the modules of this rank's stages with functions that call them, and the parameters and buffers that stages share.

    Args:
        model: The whole model. The layers of other ranks are not kept.
        cuts: The names of the layers with which the stages but the first begin.
        own: The numbers of this rank's stages.
        example: A micro-batch, with which torch traces a model that is not an ``nn.Sequential``.
        keywords: The keyword arguments of the model for that.

    Raises:
        ArgumentError: The model cannot be traced, or a stage has no parameters.
    """
    in_sequence = is_plain_sequential(model)
    if in_sequence:
        refuse_hooks(model)
        names = list(candidates(model))
        ends = [0, *map(names.index, cuts), len(names)]
        modules: list[nn.Module] = [
            Layers({name: model.get_submodule(name) for name in names[a:b]}) for a, b in pairwise(ends)
        ]
        described = [", ".join(names[a:b]) for a, b in pairwise(ends)]
    else:
        if example is None:
            raise ArgumentError(
                f"{type(model).__name__} is no plain nn.Sequential, so torch.export cuts it: give `example`, the inputs of a "
                "micro-batch."
            )
        modules = [*traced_stages(model, cuts, Inputs(example, keywords))]
        described = [f"from {cut}" for cut in ("the beginning", *cuts)]
    check_stages(modules, described)
    made = {number: (modules[number], call_of(modules[number], number == 0, spread=not in_sequence)) for number in own}
    return made, shared_parameters(modules), SharedBuffers(modules, own)


def refuse_hooks(model: nn.Module) -> None:
    """Raise for the hooks of a Sequential itself, which nobody calls once it is cut. Those of its children stay with them.

    Raises:
        ArgumentError: There are some.
    """
    if hooks := hooks_of(model):
        raise ArgumentError(
            f"the {type(model).__name__} itself has hooks ({', '.join(hooks)}), and no rank has the whole of it that they "
            "could run for. Register them for one of its layers."
        )


def check_stages(modules: Sequence[nn.Module], described: Sequence[str]) -> None:
    """Check that each stage has parameters.

    Args:
        modules: The stages, of all ranks.
        described: For each, what it consists of.

    Raises:
        ArgumentError: A stage has none.
    """
    for number, module in enumerate(modules):
        if not any(True for _ in module.parameters()):
            raise ArgumentError(
                f"stage {number} of {len(modules)} ({described[number]}) has no parameters, so its rank has nothing to train. "
                "Cut elsewhere, or use fewer ranks for the pipeline."
            )


def traced_stages(model: nn.Module, cuts: Sequence[str], example: Inputs) -> Sequence[nn.Module]:
    """Return the stages of a model that torch.export cuts.

    Raises:
        ArgumentError: It cannot, or would leave out something.
    """
    refuse_hooks_within(model)
    try:
        return trace(model, cuts, example)
    except ArgumentError:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ArgumentError(
            f"{type(model).__name__} cannot be split automatically, because torch.export cannot follow it (a branch "
            f"or a loop that depends on data, most likely): {first}. Write it as an nn.Sequential of layers, which is cut "
            "without torch.export."
        ) from error
