"""The states of optimizers of models that are split over ranks, as one process has them: with whole tensors, in its order.

A state in this form is loaded by any number of ranks that split the model in any way, and by one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvdlite.errors import ArgumentError
from hvdlite_torch.step.wrapped import Aggregating, Distributed, Local
from hvdlite_torch.tensors.sliced import cut_like, full_tensor, is_sliced, local_of
from hvdlite_torch.tensors.split import Stages, all_stages, name_of, optimizer_parameters, stages_of
from hvdlite_torch.training.state import load_optimizer_state

NAMES = "param_names"
"""The key, which is torch's, of the names of a group's parameters."""


def part_of_whole_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return this rank's part of the state that one process would have: whole tensors, and the parameters' places there.

    The parts of all stages, merged, are the whole. All ranks that have stages, slices or shards of the state call this.

    Raises:
        ArgumentError: The state cannot be put together.
    """
    if isinstance(optimizer, Aggregating | Local):
        raise ArgumentError(
            "the state of an optimizer with aggregator= or local_steps= is each rank's own, and that of a model in stages "
            "cannot be saved: leave out these arguments, or save optimizer.state_dict() on each rank by yourself."
        )
    parameters = optimizer_parameters(optimizer)
    groups, keys = _groups_of(optimizer), _keys_of(optimizer)
    found = optimizer.state_dict()
    place_of = {key: place for place, key in enumerate(key for group in groups for key in group)}
    in_stages = bool(all_stages(parameters))
    return {
        **found,
        "param_groups": [
            {**group, "params": [place_of[key] for key in own], **({NAMES: own} if in_stages else {})}
            for group, own in zip(found["param_groups"], groups, strict=True)
        ],
        "state": {
            place_of[keys[number]]: {name: _full_value(value, parameters[number]) for name, value in its.items()}
            for number, its in found["state"].items()
        },
    }


def whole_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer as one process with the whole model has it, on every rank.

    See `part_of_whole_state` for who calls this, and for the errors.
    """
    part = part_of_whole_state(optimizer)
    for stages in _only_stages(optimizer):
        part["state"] = {
            place: its
            for each in stages.gather(part["state"], "the state of the optimizer")
            for place, its in each.items()
        }
    return part


def load_whole_state(optimizer: torch.optim.Optimizer, whole: Mapping[str, Any]) -> None:
    """Load this rank's part of a whole state. All ranks that have stages, slices or shards of the state call this.

    Args:
        optimizer: The optimizer.
        whole: What `whole_state` has returned on ranks that split the model in any way, or ``state_dict()`` of one process.

    Raises:
        ArgumentError: It is the state of other parameters.
    """
    saved_groups, keys = whole["param_groups"], _keys_of(optimizer)
    by_name = all(NAMES in group for group in saved_groups) and all(isinstance(key, str) for key in keys)
    # With names each rank finds its part by itself, as one that comes back alone after a failure must.
    there = [group[NAMES] if by_name else group["params"] for group in saved_groups]
    here = there if by_name and len(there) == len(optimizer.param_groups) else _groups_of(optimizer)
    if [*map(len, there)] != [*map(len, here)]:
        raise ArgumentError(
            f"this is the state of an optimizer whose groups have {[*map(len, there)]} parameters, and here are "
            f"{[*map(len, here)]} in the whole model: make the groups as they were."
        )
    place_of = {
        key: place
        for group, own in zip(saved_groups, here, strict=True)
        for key, place in zip(own, group["params"], strict=True)
    }
    unknown = [key for key in keys if key not in place_of]
    if unknown:
        raise ArgumentError(
            f"this state has no parameter {unknown[0]!r}; it has those of {', '.join(map(repr, list(place_of)[:3]))} …: it is "
            "of another model, or of one stage only."
        )
    if by_name:
        _check_places(keys, place_of, saved_groups, optimizer.param_groups)
    parameters = optimizer_parameters(optimizer)
    numbers = iter(range(len(parameters)))
    own_groups = [
        {
            **{name: value for name, value in saved.items() if name != NAMES},
            "params": [next(numbers) for _ in group["params"]],
            **({NAMES: group[NAMES]} if NAMES in group else {}),
        }
        for saved, group in zip(saved_groups, optimizer.param_groups, strict=True)
    ]
    state = {
        number: {name: _own_value(value, parameters[number]) for name, value in whole["state"][place].items()}
        for number, key in enumerate(keys)
        if (place := place_of[key]) in whole["state"]
    }
    load_optimizer_state(optimizer, {**whole, "param_groups": own_groups, "state": state})


def _check_places(
    keys: Sequence[Any],
    place_of: Mapping[Any, int],
    saved: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Raise if a parameter is in a group of another number than in the saved state, whose settings it would get.

    Raises:
        ArgumentError: One is.
    """
    group_of = {place: number for number, group in enumerate(saved) for place in group["params"]}
    here = [number for number, group in enumerate(groups) for _ in group["params"]]
    for key, number in zip(keys, here, strict=True):
        if group_of[place_of[key]] != number:
            raise ArgumentError(
                f"this state has the parameter {key!r} in group {group_of[place_of[key]]} of the optimizer, and here it is in "
                f"group {number}: it would get the settings of others. Make the groups in the order in which they were."
            )


def name_in_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the states of a stage's optimizer name its parameters, so that it takes no other stage's state of equal shapes."""
    if all_stages(optimizer_parameters(optimizer)):
        optimizer.register_state_dict_post_hook(_add_names)
        optimizer.register_load_state_dict_pre_hook(_check_names)


def _names(optimizer: torch.optim.Optimizer) -> list[list[str | None]]:
    return [[name_of(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def _add_names(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    for group, names in zip(state_dict["param_groups"], _names(optimizer), strict=True):
        if None not in names:
            group[NAMES] = names


def _check_names(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise if a state names other parameters than those of an optimizer.

    Raises:
        ArgumentError: It does.
    """
    saved = [name for group in state_dict["param_groups"] for name in group.get(NAMES, ())]
    own = [name for names in _names(optimizer) for name in names]
    if saved and None not in own and saved != own:
        raise ArgumentError(
            f"load_state_dict: this is the state of {', '.join(map(repr, saved[:3]))} …, and the stage of this rank has "
            f"{', '.join(map(repr, own[:3]))} …: give each stage its own state. hvd.checkpoint.load and "
            "pipeline.load_optimizer_state_dict(optimizer, whole) take the state of all stages, however they are cut."
        )


def _only_stages(optimizer: torch.optim.Optimizer) -> list[Stages]:
    """Return the stages whose parameters an optimizer has, in a list of at most one.

    Raises:
        ArgumentError: It has those of several models, or some that are of no stage.
    """
    parameters = optimizer_parameters(optimizer)
    found = all_stages(parameters)
    if len(found) > 1 or (found and any(stages_of(parameter) is None for parameter in parameters)):
        others = sum(stages_of(parameter) is None for parameter in parameters)
        raise ArgumentError(
            f"an optimizer with parameters of {len(found)} models in stages, and {others} parameters of none: its state is "
            "saved whole only if all are of one model. Make an optimizer for each."
        )
    return found


def _keys_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return for each parameter what stands for it on all ranks: its name; or its number, unless all names are known."""
    parameters = optimizer_parameters(optimizer)
    names: list[Any] = [name_of(parameter) for parameter in parameters]
    if None in names:
        if all(group.get(NAMES) for group in optimizer.param_groups):
            names = [name for group in optimizer.param_groups for name in group[NAMES]]
        elif isinstance(optimizer, Distributed):
            of = optimizer._hvdlite_names
            names = [of.get(id(local_of(parameter))) for parameter in parameters]
    return list(range(len(parameters))) if None in names else names


def _groups_of(optimizer: torch.optim.Optimizer) -> list[list[Any]]:
    """Return for each group what stands for the parameters of all ranks (see `_keys_of`), in the order of the whole model.

    Raises:
        ArgumentError: The stages have different numbers of groups.
    """
    keys = iter(_keys_of(optimizer))
    own = [[next(keys) for _ in group["params"]] for group in optimizer.param_groups]
    for stages in _only_stages(optimizer):
        mine = list(zip(own, map(_settings_of, optimizer.param_groups), strict=True))
        everybody = stages.gather(mine, "the groups of the optimizer")
        told: Sequence[list[list[str]]] = [[names for names, _ in each] for each in everybody]
        if len({len(each) for each in told}) > 1:
            raise ArgumentError(
                f"the optimizers of the stages have {', '.join(str(len(each)) for each in told)} groups of parameters: make as "
                "many on each rank, if need be without parameters."
            )
        for number, groups in enumerate(zip(*everybody, strict=True)):
            _check_settings(number, [settings for _, settings in groups])
        order = {name: place for place, name in enumerate(stages.names)}
        own = [
            sorted(
                {name for each in told for name in each[number]},  # tied weights are on several ranks, under one name
                key=lambda name: (order.get(name, len(order)), name),
            )
            for number in range(len(own))
        ]
    return own


def _settings_of(group: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in group.items() if name not in ("params", NAMES)}


def _check_settings(number: int, everybody: Sequence[Mapping[str, str]]) -> None:
    """Raise if the stages have made different groups under one number, such as in another order.

    Raises:
        ArgumentError: They have.
    """
    for name in dict.fromkeys(name for each in everybody for name in each):
        values = dict.fromkeys(each.get(name, "nothing") for each in everybody)
        if len(values) > 1:
            raise ArgumentError(
                f"group {number} of the optimizers has {name}={' on one stage, '.join(values)} on another: in the whole model "
                "it is one group with one setting. Make the groups in the same order on each rank, and one for each setting "
                "of any stage, if need be without parameters."
            )


def _full_value(value: Any, parameter: torch.Tensor) -> Any:
    """Return a value of the state of a parameter with whole tensors.

    Raises:
        ArgumentError: It is neither elementwise nor the same on all ranks, so nobody could cut it again.
    """
    if isinstance(value, torch.Tensor) and is_sliced(value) and value.dim() and value.shape != parameter.shape:
        raise ArgumentError(
            f"the optimizer's state of a sliced parameter of shape {tuple(parameter.shape)} has a DTensor of shape "
            f"{tuple(value.shape)}, which cannot be saved whole: use torch.distributed.checkpoint, or another optimizer."
        )
    return full_tensor(value)


def _own_value(value: Any, parameter: torch.Tensor) -> Any:
    """Return this rank's part of a value of the whole state, as a plain tensor."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if is_sliced(parameter) and value.shape == parameter.shape:
        return local_of(cut_like(value, parameter, "a value of the optimizer's state"))
    return value
