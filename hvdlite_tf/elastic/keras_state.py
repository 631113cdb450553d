"""`TensorFlowKerasState`: what a training with Keras commits, and goes on from."""

from __future__ import annotations

from typing import Any

import hvdlite
from hvdlite.checkpoint.memory import Copy, copy_of, restore
from hvdlite.checkpoint.states import Stateful
from hvdlite.elastic import ObjectState
from hvdlite.errors import CommitError, HvdliteError
from hvdlite_tf.callbacks.start import share_state
from hvdlite_tf.checkpoint import has_own_state, stateful
from hvdlite_tf.gradients import optimizer_parts
from hvdlite_tf.gradients.own_variables import own_of, without
from hvdlite_tf.split import stages_of
from hvdlite_tf.variables import plain_variable


class TensorFlowKerasState(ObjectState):
    """The state of a training with Keras 3 or tf_keras: a model with its optimizer, and Python's objects, such as numbers.

    All ranks call `save`.

    Args:
        model: The model, which is built.
        optimizer: Its optimizer, if the model was not compiled with it.
        backend: Horovod's argument, which has no effect.
        kwargs: Values by name, which become attributes: ``state.epoch``.

    Attributes:
        model, optimizer: The arguments; the model's optimizer if none was given.

    Raises:
        ArgumentError: An attribute has the name of something else that a state has.

    Examples:
        >>> def interrupted():
        ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        ...     model.compile("sgd", "mse")
        ...     state = hvd.elastic.TensorFlowKerasState(model, epoch=3)
        ...     model.set_weights([np.ones((1, 1))])
        ...     state.commit()
        ...     model.set_weights([np.zeros((1, 1))])  # and here something fails
        ...     state.restore()
        ...     return model.get_weights()[0].item(), state.epoch
        >>> on_ranks(2, interrupted)
        [(1.0, 3), (1.0, 3)]
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        self.model = model
        self.optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        super().__init__(**kwargs)
        self._copies: dict[str, Copy] = {}
        self._is_restored = False

    def save(self) -> None:
        """Copy everything to host memory. Every rank calls this.

        Raises:
            CommitError: Something cannot be copied. The error names it.
        """
        try:
            self._copies = {name: copy_of(name, target) for name, target in self._targets().items()}
        except HvdliteError as error:
            raise CommitError(f"the state of the model cannot be saved: {error}") from error
        self._is_restored = False
        super().save()

    def restore(self) -> None:
        """Bring everything back to what it was when `save` was called. Without that, it stays."""
        if self._copies:
            for name, target in self._targets().items():
                restore(self._copies[name], target)
            self._is_restored = True
        super().restore()

    def sync(self) -> None:
        """Give all ranks the state of rank 0, and save it.

        Raises:
            ArgumentError: The model is not built on some rank. All ranks raise it.
            MismatchError: The ranks have different models. All ranks raise it.
        """
        in_stages = self.model.built and stages_of(self.model.weights) is not None
        optimizers = optimizer_parts.optimizers_in(self.model) if in_stages else self._share()
        if in_stages or any(has_own_state(each) for each in optimizers):
            # Each rank gets back what it remembers by itself of the exchange, as rank 0 has it in what was saved.
            restored = self._copies if self._is_restored else {}
            copies: dict[str, Copy] = hvdlite.broadcast_object(restored, 0, "the state of a model")
            if in_stages and not copies:  # rank 0 has brought nothing back, and all together have the whole state
                copies = {name: copy_of(name, target) for name, target in self._targets().items()}
            for name, target in self._targets().items() if copies else ():
                restore(copies[name], target)
        super().sync()

    def _share(self) -> list[Any]:
        """Give all ranks the variables of rank 0, and return the optimizers."""
        share_state(self.model)
        optimizers = optimizer_parts.optimizers_in(self.model)
        if self.optimizer is not None and all(self.optimizer is not each for each in optimizers):
            optimizer_parts.build(self.optimizer, self.model.trainable_variables)
            shared = without(optimizer_parts.state_of(self.optimizer), own_of(self.optimizer))
            hvdlite.broadcast([plain_variable(each) for each in shared], 0, inplace=True)
            if optimizer_parts.is_sharded(self.optimizer):
                self.optimizer.hvdlite_share(0)
            optimizers = [*optimizers, self.optimizer]
        return optimizers

    def saved(self) -> dict[str, Any]:
        """Return what `save` has saved."""
        return {"attributes": super().saved(), "copies": self._copies}

    def set_saved(self, saved: dict[str, Any]) -> None:
        """Replace what `save` has saved.

        Args:
            saved: What `saved` has returned.

        Raises:
            HvdliteError: The names are others than those of this state: the program has changed.
        """
        super().set_saved(saved["attributes"])
        self._copies = saved["copies"]

    def _targets(self) -> dict[str, Stateful]:
        """Return what saves and sets the state of the model, and of its optimizer if the model does not have it."""
        given = {"model": self.model}
        if self.optimizer is not None and all(
            self.optimizer is not each for each in optimizer_parts.optimizers_in(self.model)
        ):
            optimizer_parts.build(self.optimizer, self.model.trainable_variables)
            given["optimizer"] = self.optimizer
        found = {name: stateful(value) for name, value in given.items()}
        return {name: target for name, target in found.items() if target is not None}


class KerasState(TensorFlowKerasState):
    """The same as `TensorFlowKerasState`, under the name that it has in Horovod's Keras modules.

    Args:
        model: The model, which is built.
        optimizer: Its optimizer, if the model was not compiled with it.
        kwargs: Values by name, which become attributes: ``state.epoch``.

    Examples:
        >>> def started():
        ...     layer = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(5.0 + hvd.rank()))
        ...     model = keras.Sequential([keras.Input((1,)), layer])
        ...     model.compile("sgd", "mse")
        ...     state = hvd.elastic.KerasState(model, epoch=hvd.rank())
        ...     state.sync()  # `hvd.elastic.run` calls this
        ...     return layer.kernel.numpy().item(), state.epoch
        >>> on_ranks(2, started)
        [(5.0, 0), (5.0, 0)]
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)
