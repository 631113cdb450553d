"""The same start on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hvdlite
from hvdlite import ProcessSet
from hvdlite.adapter.arguments import root_within
from hvdlite.errors import ArgumentError, MismatchError
from hvdlite_tf.callbacks.base import Callback
from hvdlite_tf.gradients import optimizer_parts as optimizers
from hvdlite_tf.variables import plain_variable


class BroadcastGlobalVariablesCallback(Callback):
    """Gives every rank the root's model weights and optimizer state when `fit` begins. On every rank.

    The model must be built by then. Horovod broadcasts after the first batch instead, when each rank has updated its own
    weights with its own start.

    Args:
        root_rank: Whose values everybody gets; its rank in the job, with a process set too.
        device: Horovod's. Means nothing here.
        local_variables: Variables that every rank keeps as they are.
        process_set: The ranks that take part; all by default.
    """

    def __init__(
        self,
        root_rank: int = 0,
        device: str = "",
        local_variables: Iterable[Any] | None = None,
        *,
        process_set: ProcessSet | None = None,
    ) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._process_set = process_set
        self._local = [plain_variable(variable) for variable in local_variables or ()]

    def register_local_var(self, var: Any) -> None:
        """Let every rank keep this variable as it is.

        Args:
            var: A variable of TensorFlow or Keras.
        """
        self._local.append(plain_variable(var))

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast.

        Raises:
            ArgumentError: The model is not built on some rank. Raised on all of them.
            MismatchError: The ranks have different models. Raised on all of them.
        """
        check_models(self.model, self._process_set)
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None:  # it may be built on the root, which has loaded a checkpoint
            optimizers.build(optimizer, self.model.trainable_variables)
        build_alike(self.model, self._process_set)
        shared = [variable for variable in state_of(self.model) if all(variable is not local for local in self._local)]
        root = root_within(self._process_set, self._root_rank)
        hvdlite.broadcast(shared, root, inplace=True, process_set=self._process_set)


def state_of(model: Any) -> list[Any]:
    """TensorFlow's variables of a model's weights and of its optimizers, which are built.

    Not ``model.variables``: the states of random number generators are among them, and dropout would be the same everywhere.
    """
    state = [variable for each in optimizers.optimizers_in(model) for variable in optimizers.state_of(each)]
    return [plain_variable(variable) for variable in [*model.weights, *state]]


def build_alike(model: Any, process_set: ProcessSet | None) -> None:
    """Have each optimizer of the model make its state on all ranks, if it has some on any. Every rank calls this.

    A rank that has made no step with an optimizer has none; others know for which of the model's weights it is.
    """
    found = optimizers.optimizers_in(model)
    places = {id(plain_variable(weight)): place for place, weight in enumerate(model.weights)}
    told = hvdlite.allgather_object([_places(each, places) for each in found], process_set=process_set)
    for optimizer, built in zip(found, zip(*told, strict=True), strict=True):
        known = next((each for each in built if each), None)
        if known and not all(built):
            optimizers.build(optimizer, [model.weights[place] for place in known])


def _places(optimizer: Any, places: dict[int, int]) -> list[int] | None:
    """Which of the model's weights an optimizer has state for; None if it has none yet, or of others."""
    own = getattr(optimizer, "_trainable_variables", None) if getattr(optimizer, "built", False) else None
    found = [places.get(id(plain_variable(variable))) for variable in own or ()]
    return None if None in found else [place for place in found if place is not None] or None


def check_models(model: Any, process_set: ProcessSet | None) -> None:
    """Let models pass that are built, and alike on all ranks. Every rank calls this.

    Args:
        model: Of either Keras.
        process_set: The ranks that take part; all if None.

    Raises:
        ArgumentError: The model is not built on some rank. Raised on all of them.
        MismatchError: Numbers, shapes or dtypes of the weights differ. Raised on all of them; names the first that does.
    """
    # By shape and dtype: names count up the layers that a process has made, for this model or another.
    weights = model.weights if model.built else []  # of a model of tf_keras that is not built, to ask for them raises
    own = [(str(getattr(weight, "path", weight.name)), tuple(weight.shape), _dtype(weight)) for weight in weights]
    built = hvdlite.allgather_object(own if model.built else None, process_set=process_set)
    unbuilt = [rank for rank, layout in enumerate(built) if layout is None]
    if unbuilt:
        raise ArgumentError(
            f"the model has no weights yet on ranks {unbuilt}, so there is nothing to broadcast: begin it with "
            "keras.layers.Input, or call model.build(input_shape), on every rank, before fit()."
        )
    layouts = [layout for layout in built if layout is not None]
    for rank, layout in enumerate(layouts):
        for (name, *first), (other, *here) in zip(layouts[0], layout, strict=False):
            if first != here:
                raise MismatchError(
                    f"the ranks have different models, or data of different shapes: the weight {name} of rank 0 is of shape "
                    f"{first[0]} and {first[1]}, and {other} of rank {rank} of shape {here[0]} and {here[1]}."
                )
        if len(layout) != len(layouts[0]):
            raise MismatchError(
                f"the ranks have different models: rank 0 has {len(layouts[0])} weights, rank {rank} has {len(layout)}."
            )


def _dtype(weight: Any) -> str:
    return str(getattr(weight.dtype, "name", weight.dtype))
