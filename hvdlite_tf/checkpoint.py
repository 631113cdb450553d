"""`hvdlite.checkpoint` for Keras 3 and tf_keras: the weights of models, and the variables of optimizers.

Variables are known by their places, because their names contain a count of all layers that a process has made: weights by
those in the model, slots of an optimizer by those of the variables that it trains. Of a model in stages the places are those in
the whole model, so that it is loaded with other cuts, and by one process. The state of random number generators (of dropout) is
each rank's own, and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from hvdlite.adapter.arguments import rank_in, size_of
from hvdlite.adapter.few_bytes.resumed import share_of
from hvdlite.adapter.pipeline.stages import StageRanks
from hvdlite.api import Sum
from hvdlite.checkpoint import Loaded, load, save, wait
from hvdlite.checkpoint.states import Snapshot, StateDict, Stateful
from hvdlite.checkpoint.structure import Own
from hvdlite.errors import ArgumentError
from hvdlite.tensors.registry import adapter_for
from hvdlite_tf.gradients import optimizer_parts
from hvdlite_tf.gradients.own_variables import (
    has_own_sums,
    load_sums,
    local_variables_of,
    saved_sums,
    summed_for,
    sums_of,
    without,
)
from hvdlite_tf.split import place_of, stages_of
from hvdlite_tf.variables import plain_variable

__all__ = ["Loaded", "load", "save", "wait"]


def stateful(value: Any) -> Stateful | None:
    """Return what saves and sets the state of a model or an optimizer of Keras; None if it is neither.

    Raises:
        ArgumentError: The optimizer trains with a parameter server.
    """
    if isinstance(value, type):
        return None
    if optimizer_parts.has_servers(getattr(value, "optimizer", value)):
        raise ArgumentError(
            "the servers of AsyncDistributedOptimizer have the state: save a model that is not compiled, after synchronize()."
        )
    # The class is asked, because the weights of a model of tf_keras that is not built raise.
    if all(hasattr(type(value), name) for name in ("weights", "get_config", "call")):
        return _ModelState(value)
    if hasattr(value, "apply_gradients") and hasattr(value, "iterations"):
        return _KerasOptimizerState(value)
    return StateDict(value) if hasattr(value, "load_state_dict") else None  # a module of torch is a layer of Keras, too


def has_own_state(optimizer: Any) -> bool:
    """Return whether each rank has a state of its own of an optimizer, besides what all have."""
    exchange = getattr(optimizer, "exchange_state", dict)
    return optimizer_parts.local_steps_of(optimizer) is not None or has_own_sums(optimizer) or bool(exchange())


class _KerasOptimizerState:
    """The state of one optimizer: its variables, and what it remembers of the exchange of gradients."""

    copies = False  # TensorFlow may take memory as it is

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def parts_of(self) -> tuple[int, ...]:
        return _members_of(self.stages)

    @property
    def stages(self) -> StageRanks | None:
        """The model in stages that the optimizer trains; None if all ranks have the whole model."""
        return stages_of(_trained_by(self.optimizer))

    def snapshot(self, rank: int) -> Snapshot:
        own = self.stages is not None or has_own_state(self.optimizer)
        return Snapshot(self.value(rank == 0 or not own), on_each_rank=own)

    def value(self, whole: bool) -> dict[str, Any]:
        """Return the state; if not `whole`, only what this rank has for itself."""
        optimizer, stages = self.optimizer, self.stages
        steps = optimizer_parts.local_steps_of(optimizer)
        exchange = optimizer.exchange_state() if hasattr(optimizer, "exchange_state") else {}
        if stages is not None and (steps is not None or exchange):
            raise ArgumentError(
                "the state of an optimizer with aggregator= or local_steps= is each rank's own, and that of a model in stages "
                "cannot be saved: leave out these arguments, or save optimizer.variables on each rank by yourself."
            )
        if steps is not None and steps.rounds.pending:
            raise ArgumentError(
                "with local_steps= the ranks have different weights between two meetings: call "
                "optimizer.average_parameters() on all ranks before you save."
            )
        found: dict[str, Any] = {}
        built = _is_built(optimizer)
        plain = optimizer.hvdlite_whole() if built and optimizer_parts.is_sharded(optimizer) else optimizer
        if whole or steps is not None or stages is not None:
            values = {name: _values_of(group) for name, group in _groups_of(plain).items()} if built else None
            found = {"class": type(optimizer_parts.innermost(optimizer)).__name__, "in stages": stages is not None}
            found["variables"] = values if steps is None else Own(values)  # its slots are this rank's own
        if built and sums_of(plain):
            options, places = optimizer_parts.options_of(optimizer), _places_of(plain)
            found["summed"] = options is not None and options.op is Sum
            numbers = [str(places[id(variable)]) for variable in summed_for(plain)]
            sums = dict(zip(numbers, saved_sums(plain, optimizer), strict=True))
            # Those of a stage are saved also if they are zero, so that each is there as often as the others.
            given = sums if stages is not None or any(each.any() for each in sums.values()) else None
            found["sums"] = Own(given) if has_own_sums(optimizer) else given
        return {**found, "exchange": Own(exchange)} if exchange else found

    def check(self, value: Any, rank: int, ranks: int) -> None:
        return  # `restore` looks before it sets anything of this object

    def restore(self, value: Any, rank: int, ranks: int) -> None:
        optimizer, stages = self.optimizer, self.stages
        variables = value["variables"]
        if isinstance(variables, list):
            variables = variables[rank % len(variables)]
        if variables is not None:
            if not _is_built(optimizer):
                raise ArgumentError(
                    "this optimizer has no variables yet: call optimizer.build(model.trainable_variables) before, or load the "
                    "compiled model, which has it."
                )
            whole = optimizer.hvdlite_plain() if optimizer_parts.is_sharded(optimizer) else optimizer
            first = None if stages is None or value["in stages"] else self._trained_before(stages)
            _assign_groups(_groups_of(whole, first), variables, value["class"], stages is not None)
            self._restore_sums(whole, value, first, rank, ranks)
            if whole is not optimizer:
                optimizer.hvdlite_load(whole)
        if "exchange" in value and hasattr(optimizer, "load_exchange_state") and optimizer.exchange_state():
            everybody = value["exchange"]
            own = dict(everybody[rank % len(everybody)])
            if "aggregator" in own:
                aggregator = optimizer_parts.options_of(optimizer).aggregator
                own["aggregator"] = share_of([each["aggregator"] for each in everybody], aggregator, rank, ranks)
            optimizer.load_exchange_state(own)

    def _restore_sums(self, whole: Any, value: Mapping[str, Any], first: int | None, rank: int, ranks: int) -> None:
        optimizer, stages = self.optimizer, self.stages
        given = value.get("sums")
        everybody = given if isinstance(given, list) else [given]
        if value["in stages"] and isinstance(given, list):  # each rank has said those of its stage
            places = {place for each in given for place in each}
            copies = zip(*([each[place] for each in given if place in each] for place in places), strict=True)
            everybody = [dict(zip(places, copy, strict=True)) for copy in copies]
        if stages is not None:
            place_in = _places_of(whole, first)
            own = [str(place_in[id(variable)]) for variable in summed_for(whole)]
            everybody = [None if each is None else {place: each[place] for place in own} for each in everybody]
            options = optimizer_parts.options_of(optimizer)
            rank, ranks = (0, 1) if options is None else (rank_in(options.process_set), size_of(options.process_set))
        sums = [None if each is None else [each[place] for place in sorted(each, key=int)] for each in everybody]
        load_sums(whole, optimizer, sums, value.get("summed", False), rank, ranks)

    def _trained_before(self, stages: StageRanks) -> int:
        """Return how many variables the optimizers of the stages before train. All ranks of the model call this."""
        own = _trained_by(self.optimizer)
        here = place_of(own[0])
        counts = stages.gather((here, len(own)), "what the optimizers train")
        return sum(count for place, count in counts if place < here)

    def have_same_state(self) -> None:
        return


class _ModelState:
    """The state of a model: its weights, and the states of its optimizers."""

    copies = False  # TensorFlow may take memory as it is

    def __init__(self, model: Any) -> None:
        self._model = model
        self._optimizers = [_KerasOptimizerState(each) for each in optimizer_parts.optimizers_in(model)]

    @property
    def parts_of(self) -> tuple[int, ...]:
        return _members_of(self._stages)

    @property
    def _stages(self) -> StageRanks | None:
        return stages_of(self._model.weights) if self._model.built else None

    def snapshot(self, rank: int) -> Snapshot:
        _check_built(self._model)
        if any(local_variables_of(each.optimizer) for each in self._optimizers):
            raise ArgumentError(
                "this model has local variables, which each rank has for itself, and a checkpoint of Keras holds one model for "
                "all: save them by allgather_object, as a value."
            )
        for each in self._optimizers:
            optimizer_parts.build(each.optimizer, self._model.trainable_variables)
        own = self._stages is not None or any(has_own_state(each.optimizer) for each in self._optimizers)
        whole = rank == 0 or not own
        value: dict[str, Any] = {}
        if whole or self._stages is not None:
            value["weights"] = _values_of(_by_place(self._model.weights))
        value["optimizers"] = {str(number): each.value(whole) for number, each in enumerate(self._optimizers)}
        return Snapshot(value, on_each_rank=own)

    def check(self, value: Any, rank: int, ranks: int) -> None:
        return  # `restore` looks before it sets anything of this object

    def restore(self, value: Any, rank: int, ranks: int) -> None:
        _check_built(self._model)
        weights = _by_place(self._model.weights)
        _assign(weights.values(), _own_part(value["weights"], weights, self._stages is not None), "the model")
        # A checkpoint of a model that was not compiled has no optimizers, and a model that only predicts needs none.
        for optimizer, (_, state) in zip(self._optimizers, value["optimizers"].items(), strict=False):
            optimizer_parts.build(optimizer.optimizer, self._model.trainable_variables)
            optimizer.restore(state, rank, ranks)

    def have_same_state(self) -> None:
        return


_REST = "rest"
"""The group of the variables of an optimizer that are no slots: counts, learning rates."""
_Group = dict[int, Any]
"""Variables by their places."""


def _groups_of(optimizer: Any, first: int | None = None) -> dict[str, _Group]:
    """Return the variables of a built optimizer, but gradients that it adds up, by what they are.

    Args:
        optimizer: The optimizer, which is not sharded.
        first: See `_places_of`.

    Returns:
        A group for each kind of slot, with places of the variables that the optimizer trains; and one of the other variables.
    """
    variables = without(optimizer_parts.state_of(optimizer), sums_of(optimizer))
    left = {id(plain_variable(variable)): variable for variable in variables}
    found: dict[str, _Group] = {}
    places = _places_of(optimizer, first)
    if isinstance(optimizer, keras.optimizers.Optimizer):
        for number, part in enumerate(optimizer_parts.parts_inside(optimizer)):
            for name, slots in optimizer_parts.slots_of(part).items():
                pairs = zip(part._trainable_variables, slots, strict=True)
                group = {
                    places[id(variable)]: left.pop(id(plain_variable(slot)))
                    for variable, slot in pairs
                    if id(plain_variable(slot)) in left
                }
                found |= {f"{number}.{name}": group} if group else {}
    rest = list(left.values())
    if stages_of(_trained_by(optimizer)) is not None and any(tuple(each.shape) for each in rest):
        raise ArgumentError(
            f"{type(optimizer_parts.innermost(optimizer)).__name__} keeps variables of its own that are not in lists with one "
            "for each variable of the model, so its state cannot be put together for a model in stages: save pipeline.stage "
            "of each rank by yourself, or use another optimizer."
        )
    return {**found, _REST: dict(enumerate(rest))}


def _trained_by(optimizer: Any) -> list[Any]:
    """Return the variables that an optimizer of Keras 3 trains; none if it is not built, or another optimizer."""
    known = hasattr(optimizer, "_trainable_variables") and _is_built(optimizer)
    return optimizer_parts.trained_by(optimizer) if known else []


def _places_of(optimizer: Any, first: int | None = None) -> dict[int, int]:
    """Return the places of the variables that an optimizer trains, by their identities.

    Args:
        optimizer: The optimizer.
        first: How many variables the optimizers of the stages before train, to count trained variables only.
    """
    trained = _trained_by(optimizer)
    if first is None and stages_of(trained) is not None:
        return {id(variable): place_of(variable) for variable in trained}
    return {id(variable): place for place, variable in enumerate(trained, first or 0)}


def _by_place(weights: Sequence[Any]) -> _Group:
    return dict(enumerate(weights) if stages_of(weights) is None else ((place_of(each), each) for each in weights))


def _members_of(stages: StageRanks | None) -> tuple[int, ...]:
    return () if stages is None else tuple(stages.process_set.members)


def _values_of(variables: Mapping[int, Any]) -> dict[str, Any]:
    """Return the values of variables as arrays. Their keys are their places and, for readers, their names."""
    return {
        f"{place}.{getattr(variable, 'path', variable.name)}": adapter_for(plain_variable(variable)).to_array(
            plain_variable(variable), wide=False
        )
        for place, variable in variables.items()
    }


def _own_part(values: Mapping[str, Any], variables: _Group, in_stages: bool) -> dict[str, Any]:
    """Return those of the values that belong to variables of this rank, in their order."""
    found = sorted((int(key.partition(".")[0]), key) for key in values)
    return {key: values[key] for place, key in found if not in_stages or place in variables}


def _assign_groups(groups: Mapping[str, _Group], values: Mapping[str, Any], kind: str, in_stages: bool) -> None:
    """Set the variables of an optimizer. See `_assign` for errors."""
    own = {
        name: _own_part(each, groups.get(name, {}), in_stages and name != _REST)
        for name, each in sorted(values.items())
    }
    there = {f"{name}/{key}": value for name, part in own.items() for key, value in part.items()}
    here = [groups[name][place] for name in sorted(groups) for place in sorted(groups[name])]
    saved, wanted = ({name for name, part in each.items() if part} for each in (own, groups))
    if saved != wanted:
        raise ArgumentError(
            f"the {kind} was another one when this checkpoint was saved: it had {', '.join(sorted(values))}, and here are "
            f"{', '.join(sorted(wanted))}."
        )
    _assign(here, there, f"the {kind}")


def _assign(variables: Iterable[Any], values: Mapping[str, Any], what: str) -> None:
    """Set variables in their order.

    Raises:
        ArgumentError: The values are of other variables. None is changed then.
    """
    variables = list(variables)
    here = [tuple(variable.shape) for variable in variables]
    there = [tuple(value.shape) for value in values.values()]
    if here != there:
        different = next((i for i, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), None)
        raise ArgumentError(
            f"{what} was another one when this checkpoint was saved: it had {len(there)} variables, and here are {len(here)}."
            if different is None
            else f"{what} was another one when this checkpoint was saved: {list(values)[different]} was of shape "
            f"{there[different]}, and here it is of shape {here[different]}."
        )
    for variable, value in zip(variables, values.values(), strict=True):
        variable.assign(value)


def _is_built(optimizer: Any) -> bool:
    inner = optimizer_parts.innermost(optimizer)
    if hasattr(inner, "_create_all_weights"):  # legacy
        return bool(inner.variables())
    return bool(getattr(inner, "built", False) or getattr(inner, "_built", False))


def _check_built(model: Any) -> None:
    if not model.built:
        raise ArgumentError(
            "the model has no weights yet: begin it with keras.layers.Input, or call model.build(input_shape), before."
        )
