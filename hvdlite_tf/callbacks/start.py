"""A callback that gives all ranks the same weights and optimizer state at the start of `fit`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hvdlite
from hvdlite import ProcessSet
from hvdlite.adapter.arguments import root_within
from hvdlite.errors import ArgumentError, MismatchError
from hvdlite.operations.negotiation.mismatch import compare_settings
from hvdlite_tf.callbacks.base import Callback
from hvdlite_tf.gradients import optimizer_parts as optimizers
from hvdlite_tf.gradients.own_variables import own_of, without
from hvdlite_tf.split import check_apart
from hvdlite_tf.variables import plain_variable


class BroadcastGlobalVariablesCallback(Callback):
    """Gives every rank the root's model weights and optimizer state when `fit` begins. Every rank passes it to `fit`.

    The model must be built before `fit`. (Horovod broadcasts after the first batch instead, when each rank has updated weights
    of its own.)

    Args:
        root_rank: The rank in the job of the root, whose values all ranks get; also with a process set.
        device: Horovod's argument, which has no effect.
        local_variables: Variables that are not broadcast.
        process_set: The ranks that take part; None means all ranks.

    Examples:
        >>> def start():
        ...     layer = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(5.0 + hvd.rank()))
        ...     model = keras.Sequential([keras.Input((1,)), layer])
        ...     model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
        ...     model.fit(np.ones((1, 1)), np.ones((1, 1)), callbacks=[hvd.BroadcastGlobalVariablesCallback(0)], verbose=0)
        ...     return layer.kernel.numpy().item()
        >>> on_ranks(2, start)
        [5.0, 5.0]
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
        """Leave a variable out of the broadcast.

        Args:
            var: A variable of TensorFlow or Keras.
        """
        self._local.append(plain_variable(var))

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast the weights and the optimizer state.

        Raises:
            ArgumentError: The model is not built on some rank. All ranks raise it.
            MismatchError: The ranks have different models. All ranks raise it.
        """
        share_state(self.model, self._root_rank, self._local, self._process_set)


def share_state(
    model: Any, root_rank: int = 0, local: Iterable[Any] = (), process_set: ProcessSet | None = None
) -> None:
    """Give every rank the root's weights and the states of its optimizers. Every rank calls this.

    Args:
        model: A model.
        root_rank: The rank in the job of the root, also with a process set.
        local: The backend's variables that are not broadcast.
        process_set: The ranks that take part; None means all ranks.

    Raises:
        ArgumentError: The model is not built on some rank, or the ranks have different stages of it. All ranks raise it.
        MismatchError: The ranks have different models. All ranks raise it.
    """
    check_stages(model, process_set)
    check_models(model, process_set)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:  # the root's may be built already, because the root has loaded a checkpoint
        optimizers.build(optimizer, model.trainable_variables)
    build_alike(model, process_set)
    apart = list(local)
    for each in optimizers.optimizers_in(model):
        if (steps := optimizers.local_steps_of(each)) is None:
            continue
        steps.begin()
        # Ranks that have made as many steps by themselves keep the state that they have come to.
        made = hvdlite.allgather_object(optimizers.passes_of(each), process_set=process_set)
        if len(set(made)) == 1:
            apart += each.variables
    shared = without(state_of(model), apart)
    root = root_within(process_set, root_rank)
    hvdlite.broadcast(shared, root, inplace=True, process_set=process_set)
    for each in filter(optimizers.is_sharded, optimizers.optimizers_in(model)):
        each.hvdlite_share(root)


def state_of(model: Any) -> list[Any]:
    """Return the backend's variables of a model's weights and of its built optimizers, without those that are a rank's own.

    These are not ``model.variables``, which include the states of random number generators: dropout would be the same on all
    ranks.
    """
    built = optimizers.optimizers_in(model)
    state = [variable for each in built for variable in optimizers.state_of(each)]
    own = [variable for each in built for variable in own_of(each)]
    return [plain_variable(variable) for variable in without([*model.weights, *state], own)]


def build_alike(model: Any, process_set: ProcessSet | None) -> None:
    """Build each optimizer of the model on all ranks if it is built on any rank. Every rank calls this.

    An optimizer that has made no step has no state. Ranks on which it has state tell the others which weights the state is for.
    """
    found = optimizers.optimizers_in(model)
    places = {id(plain_variable(weight)): place for place, weight in enumerate(model.weights)}
    told = hvdlite.allgather_object([_places(each, places) for each in found], process_set=process_set)
    for optimizer, built in zip(found, zip(*told, strict=True), strict=True):
        known = next((each for each in built if each), None)
        if known and not all(built):
            optimizers.build(optimizer, [model.weights[place] for place in known])


def _places(optimizer: Any, places: dict[int, int]) -> list[int] | None:
    """Return the indices of the model's weights for which an optimizer has state.

    The result is None if the optimizer has no state yet, or has state of other variables.
    """
    known = hasattr(optimizer, "_trainable_variables") and getattr(optimizer, "built", False)
    own = optimizers.trained_by(optimizer) if known else ()
    found = [places.get(id(plain_variable(variable))) for variable in own]
    return None if None in found else [place for place in found if place is not None] or None


def check_stages(model: Any, process_set: ProcessSet | None) -> None:
    """Raise ArgumentError if ranks that shall get one rank's weights have different stages of a `Pipeline`."""
    if callable(getattr(model, "full_weights", None)):
        check_apart(model.weights[:1], process_set)


def check_models(model: Any, process_set: ProcessSet | None) -> None:
    """Raise an error on all ranks unless the model is built on all of them with the same weights. Every rank calls this.

    Args:
        model: A model of Keras 3 or tf_keras.
        process_set: The ranks that take part; None means all ranks.

    Raises:
        ArgumentError: The model is not built on some rank. All ranks raise it.
        MismatchError: Numbers, shapes or dtypes of the weights differ, or the classes or settings of the optimizers. All ranks
            raise it; the text names the first difference.
    """
    # Shapes and dtypes are compared, but not names, which contain a count of all layers that the process has made.
    weights = model.weights if model.built else []  # the weights of an unbuilt tf_keras model raise
    own = [(str(getattr(weight, "path", weight.name)), tuple(weight.shape), _dtype(weight)) for weight in weights]
    settings = [line for each in optimizers.optimizers_in(model) for line in optimizers.settings_of(each)]
    told = hvdlite.allgather_object((own if model.built else None, settings), process_set=process_set)
    told = [each or (None, settings) for each in told]  # None of a rank that has joined
    built = [layout for layout, _ in told]
    compare_settings(
        hvdlite.global_process_set.ranks if process_set is None else process_set.ranks, [of for _, of in told]
    )
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
