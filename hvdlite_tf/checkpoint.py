"""`hvdlite.checkpoint` for Keras 3 and tf_keras: the weights of models, and the variables of optimizers.

Variables are known by their places, because their names contain a count of all layers that a process has made. The state of
random number generators (of dropout) is each rank's own, and is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdlite.adapter.few_bytes.resumed import share_of
from hvdlite.api import Sum
from hvdlite.checkpoint import Loaded, load, save
from hvdlite.checkpoint.states import Snapshot, StateDict, Stateful
from hvdlite.checkpoint.structure import Own
from hvdlite.errors import ArgumentError
from hvdlite.tensors.registry import adapter_for
from hvdlite_tf.gradients import optimizer_parts
from hvdlite_tf.gradients.own_variables import has_own_sums, load_sums, local_variables_of, saved_sums, sums_of, without
from hvdlite_tf.variables import plain_variable

__all__ = ["Loaded", "load", "save"]


def stateful(value: Any) -> Stateful | None:
    """Return what saves and sets the state of a model or an optimizer of Keras; None if it is neither.

    Raises:
        ArgumentError: The optimizer trains with a parameter server, or the model is in stages.
    """
    if isinstance(value, type):
        return None
    if callable(getattr(value, "full_weights", None)):
        raise ArgumentError(
            "this model is a Pipeline, of which each rank has a stage, and a checkpoint of Keras holds a whole model: save "
            "stage=pipeline.stage and optimizer=pipeline.optimizer, with process_set=, the ranks that have it, and a folder "
            "for each; or pipeline.full_weights() as a value."
        )
    if optimizer_parts.has_servers(getattr(value, "optimizer", value)):
        raise ArgumentError(
            "the servers of AsyncDistributedOptimizer have the state: save a model that is not compiled, after synchronize()."
        )
    # The class is asked, because the weights of a model of tf_keras that is not built raise.
    if all(hasattr(type(value), name) for name in ("weights", "get_config", "call")):
        return _ModelState(value)
    if hasattr(value, "apply_gradients") and hasattr(value, "iterations"):
        return _OptimizerState(value)
    return StateDict(value) if hasattr(value, "load_state_dict") else None  # a module of torch is a layer of Keras, too


def has_own_state(optimizer: Any) -> bool:
    """Return whether each rank has a state of its own of an optimizer, besides what all have."""
    exchange = getattr(optimizer, "exchange_state", dict)
    return optimizer_parts.local_steps_of(optimizer) is not None or has_own_sums(optimizer) or bool(exchange())


class _OptimizerState:
    """The state of one optimizer: its variables, and what it remembers of the exchange of gradients."""

    parts_of: tuple[int, ...] = ()

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def snapshot(self, rank: int) -> Snapshot:
        own = has_own_state(self.optimizer)
        return Snapshot(self.value(rank == 0 or not own), on_each_rank=own)

    def value(self, whole: bool) -> dict[str, Any]:
        """Return the state; if not `whole`, only what this rank has for itself."""
        optimizer = self.optimizer
        steps = optimizer_parts.local_steps_of(optimizer)
        if steps is not None and steps.rounds.pending:
            raise ArgumentError(
                "with local_steps= the ranks have different weights between two meetings: call "
                "optimizer.average_parameters() on all ranks before you save."
            )
        found: dict[str, Any] = {}
        exchange = optimizer.exchange_state() if hasattr(optimizer, "exchange_state") else {}
        built = _is_built(optimizer)
        plain = optimizer.hvdlite_whole() if built and optimizer_parts.is_sharded(optimizer) else optimizer
        if whole or steps is not None:
            values = _values_of(without(optimizer_parts.state_of(plain), sums_of(plain))) if built else None
            found = {"class": type(optimizer_parts.innermost(optimizer)).__name__}
            found["variables"] = values if steps is None else Own(values)  # its slots are this rank's own
        if built and sums_of(plain):
            options = optimizer_parts.options_of(optimizer)
            found["summed"] = options is not None and options.op is Sum
            sums = saved_sums(plain, optimizer)
            found["sums"] = Own(sums) if has_own_sums(optimizer) else [sums]
        return {**found, "exchange": Own(exchange)} if exchange else found

    def restore(self, value: Any, rank: int, ranks: int) -> None:
        optimizer = self.optimizer
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
            _assign(without(optimizer_parts.state_of(whole), sums_of(whole)), variables, f"the {value['class']}")
            load_sums(whole, optimizer, value.get("sums", [None]), value.get("summed", False), rank, ranks)
            if whole is not optimizer:
                optimizer.hvdlite_load(whole)
        if "exchange" in value and hasattr(optimizer, "load_exchange_state") and optimizer.exchange_state():
            everybody = value["exchange"]
            own = dict(everybody[rank % len(everybody)])
            if "aggregator" in own:
                aggregator = optimizer_parts.options_of(optimizer).aggregator
                own["aggregator"] = share_of([each["aggregator"] for each in everybody], aggregator, rank, ranks)
            optimizer.load_exchange_state(own)

    def have_same_state(self) -> None:
        return


class _ModelState:
    """The state of a model: its weights, and the states of its optimizers."""

    parts_of: tuple[int, ...] = ()

    def __init__(self, model: Any) -> None:
        self._model = model
        self._optimizers = [_OptimizerState(each) for each in optimizer_parts.optimizers_in(model)]

    def snapshot(self, rank: int) -> Snapshot:
        _check_built(self._model)
        if any(local_variables_of(each.optimizer) for each in self._optimizers):
            raise ArgumentError(
                "this model has local variables, which each rank has for itself, and a checkpoint of Keras holds one model for "
                "all: save them by allgather_object, as a value."
            )
        for each in self._optimizers:
            optimizer_parts.build(each.optimizer, self._model.trainable_variables)
        own = any(has_own_state(each.optimizer) for each in self._optimizers)
        whole = rank == 0 or not own
        value: dict[str, Any] = {"weights": _values_of(self._model.weights)} if whole else {}
        value["optimizers"] = {str(number): each.value(whole) for number, each in enumerate(self._optimizers)}
        return Snapshot(value, on_each_rank=own)

    def restore(self, value: Any, rank: int, ranks: int) -> None:
        _check_built(self._model)
        _assign(self._model.weights, value["weights"], "the model")
        # A checkpoint of a model that was not compiled has no optimizers, and a model that only predicts needs none.
        for optimizer, (_, state) in zip(self._optimizers, value["optimizers"].items(), strict=False):
            optimizer_parts.build(optimizer.optimizer, self._model.trainable_variables)
            optimizer.restore(state, rank, ranks)

    def have_same_state(self) -> None:
        return


def _values_of(variables: Sequence[Any]) -> dict[str, Any]:
    """Return the values of variables as arrays. Their keys are their places and, for readers, their names."""
    return {
        f"{number}.{getattr(variable, 'path', variable.name)}": _array(plain_variable(variable))
        for number, variable in enumerate(variables)
    }


def _array(variable: Any) -> Any:
    return adapter_for(variable).to_array(variable, wide=False)


def _assign(variables: Sequence[Any], values: Mapping[str, Any], what: str) -> None:
    """Set variables in their order.

    Raises:
        ArgumentError: The values are of other variables. None is changed then.
    """
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
