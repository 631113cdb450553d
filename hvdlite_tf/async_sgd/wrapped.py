"""`AsyncDistributed`: the methods that an optimizer of Keras with a parameter server has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from hvdlite.async_sgd.training.methods import AsyncMethods
from hvdlite.errors import ArgumentError
from hvdlite_tf.async_sgd.training import KerasTraining
from hvdlite_tf.variables import is_slices, plain_variable, times


class AsyncDistributed(AsyncMethods, keras.optimizers.Optimizer):  # type: ignore[misc]  # mypy does not see Keras
    """The methods that `AsyncDistributedOptimizer` adds to an optimizer's class.

    Examples:
        >>> def trained():
        ...     weight = keras.Variable([0.0])
        ...     optimizer = hvd.AsyncDistributedOptimizer(keras.optimizers.SGD(1.0), [weight], mode="sync")
        ...     optimizer.set_batch_weight(1 + 2 * hvd.rank())  # rank 0 has one sample, rank 1 has three
        ...     optimizer.apply_gradients([(tf.constant([float(hvd.rank())]), weight)])
        ...     optimizer.finish()
        ...     return weight.numpy().tolist()
        >>> on_ranks(2, trained)
        [[-0.75], [-0.75]]
    """

    _hvdlite_training: KerasTraining

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """Push the gradients, and pull the variables and the number of steps. The arguments are those of Keras.

        Raises:
            ArgumentError: This rank only serves, or the training is over, or a gradient has NaN or infinite elements: then
                nothing was pushed.
            HvdliteError: A server has failed, or a rank has left the job.
        """
        gradients = list(grads)
        if not gradients:
            return  # as in Keras
        given = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if len(given) != len(gradients):
            raise ArgumentError(
                f"apply(): {len(gradients)} gradients for {len(given)} variables: expected one for each."
            )
        self._check_variables_are_known(given)
        gradients, given = self._filter_empty_gradients(gradients, given)
        numbers = [self._get_variable_index(variable) for variable in given]
        if len(set(numbers)) < len(numbers):
            raise ArgumentError("apply(): a variable comes twice. Add its gradients.")
        if self.loss_scale_factor is not None:
            gradients = [times(gradient, 1 / self.loss_scale_factor) for gradient in gradients]
        if self.global_clipnorm:  # a server has a part of the gradients
            gradients = [*map(_dense, gradients, given)]
            gradients = self._clip_gradients(gradients)
        self._hvdlite_training.step(numbers, gradients, self.learning_rate)

    def build(self, variables: Iterable[Any]) -> None:
        """Check that the variables are those that the servers have.

        Raises:
            ArgumentError: They are others.
        """
        given = [self._var_key(variable) for variable in variables]
        if given != [self._var_key(variable) for variable in self._trainable_variables]:
            raise ArgumentError(
                "the servers have other variables than those that are to be trained. Wrap a new optimizer when the trainable "
                "variables of the model are known."
            )

    def set_batch_weight(self, weight: float) -> None:
        """Set the number of samples whose mean this rank's gradients are. It holds until the next call, and is 1 at first.

        With mode="sync" gradients are averaged by these weights. In all modes a step of 0 samples pushes no gradient. The
        other modes apply each gradient as it is, so that other weights have no effect there.

        Args:
            weight: The number of samples, 0 or more.

        Raises:
            ArgumentError: The weight is negative.
        """
        if not weight >= 0:
            raise ArgumentError(f"set_batch_weight({weight!r}): expected the number of this rank's samples, 0 or more.")
        self._hvdlite_training.weight = float(weight)

    def synchronize(self) -> None:
        """Wait for all ranks, which call this too; then all have the same variables and the same state of the optimizer.

        A program calls this before it compares ranks, tests its model on several ranks, or saves the model.

        Raises:
            ArgumentError: The training is over.
            HvdliteError: A server has failed, or a rank has left the job, or the ranks have called different things.
        """
        self._hvdlite_training.check_open("synchronize()")
        self._hvdlite_training.get_state()

    def restart(self) -> None:
        """Let the servers go on from the weights and the state of the first rank's optimizer. All ranks that train call this.

        A program calls this after it has loaded or changed weights (`load_weights`, `set_weights`); else the next pull would
        replace them by those of the servers.

        Raises:
            ArgumentError: The training is over.
            HvdliteError: See `synchronize`.
        """
        self._hvdlite_training.put_state()

    def finalize_variable_values(self, var_list: Iterable[Any]) -> None:
        """Meet all ranks at the end of `fit`, and do what Keras does then.

        Raises:
            HvdliteError: See `synchronize`.
        """
        self._hvdlite_training.get_state()
        super().finalize_variable_values(var_list)
        if self.use_ema:  # the variables now have their averages
            self._hvdlite_training.put_state()

    def save_own_variables(self, store: Any) -> None:
        """Save the state, if this rank has got it from the servers since its last step.

        Raises:
            ArgumentError: It has not.
        """
        if not self._hvdlite_training.knows_state:
            raise ArgumentError(
                "the optimizer's state is on the servers: call optimizer.synchronize() on all ranks before one of them saves "
                "the model (the end of fit does that), or save a copy of the model that is not compiled "
                "(keras.models.clone_model, set_weights)."
            )
        super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Raise ArgumentError: the servers have the state."""
        raise ArgumentError(
            "the optimizer's state is on the servers. Load the whole model (keras.models.load_model), wrap its optimizer, and "
            "compile the model with it."
        )

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Raise ArgumentError: the servers have the settings."""
        raise ArgumentError(
            "exclude_from_weight_decay: the servers have their settings. Call it before you wrap the optimizer."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_scale_factor":
            raise ArgumentError(
                "a LossScaleOptimizer does not work with a parameter server; compile puts one around the optimizer of a "
                "mixed_float16 model. Use mixed_bfloat16, or DistributedOptimizer, or compile(auto_scale_loss=False) and an "
                "optimizer with loss_scale_factor."
            )
        super().__setattr__(name, value)

    @classmethod
    def from_config(cls, config: Any, *arguments: Any, **keywords: Any) -> Any:
        """Make a plain optimizer of this configuration. The arguments are those of the plain class."""
        plain: Any = next(base for base in cls.__mro__ if not issubclass(base, AsyncDistributed))
        return plain.from_config(config, *arguments, **keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        raise ArgumentError("an optimizer with a parameter server cannot be copied or pickled. Save the model.")


def _dense(gradient: Any, variable: Any) -> Any:
    """Return a gradient as a dense tensor. Rows that come twice are added."""
    if not is_slices(gradient):
        return gradient
    from hvdlite_tf.gradients.encoded import as_dense  # where there is no TensorFlow, there are no such gradients

    return as_dense(gradient, plain_variable(variable))
