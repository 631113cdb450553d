"""Behaviour of the Keras versions of Horovod's time, for programs that run unmodified under `hvdlite.compat`.

`KerasHabits` and `gradients_of` are for distributed optimizers. `let_keras_take` is for Keras itself: programs pass an argument
to ``model.compile`` that only Horovod needed, and call ``optimizer.variables()`` of optimizers that are not wrapped.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.trainer import Trainer

from hvdlite_tf.optimizers.keras import DistributedKerasOptimizer

_DROPPED = "experimental_run_tf_function"


class CallableList(list[Any]):
    """A list that can be called and returns itself: ``optimizer.variables`` was a method in Keras 2, and is a list now."""

    def __call__(self) -> list[Any]:
        return self


def gradients_of(loss: Any, variables: Any, output_gradients: Any, tape: Any) -> list[tuple[Any, Any]]:
    """Return this rank's gradients with their variables, as ``_compute_gradients`` of Keras 2's optimizers did.

    Args:
        loss: A tensor that `tape` has recorded; or a function without arguments that computes it.
        variables: A list of variables, or a function that returns one.
        output_gradients: The upstream gradients of the loss; None means 1.
        tape: The tape; None means a new one.

    Raises:
        ValueError: `loss` is a tensor and there is no tape.
    """
    if tape is None and not callable(loss):
        raise ValueError("`tape` is required when a `Tensor` loss is passed.")  # the text of Keras 2
    tape = tf.GradientTape() if tape is None else tape
    if callable(loss):
        with tape:
            loss = loss()
    variables = variables() if callable(variables) else list(variables)
    return list(zip(tape.gradient(loss, variables, output_gradients), variables, strict=True))


class KerasHabits(DistributedKerasOptimizer):
    """A mixin with ``variables()``, ``lr`` and ``_compute_gradients`` of optimizers in Keras 2 and Horovod."""

    @property
    def variables(self) -> Any:
        """The optimizer's variables."""
        return CallableList(super().variables)

    @property
    def lr(self) -> Any:
        """The learning rate."""
        return self.learning_rate

    @lr.setter
    def lr(self, value: Any) -> None:
        self.learning_rate = value

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """Return the gradients of all ranks, for `apply_gradients`; with accumulation this rank's, which updates combine."""
        gradients, variables = zip(*gradients_of(loss, var_list, grad_loss, tape), strict=True)
        return list(zip(self._allreduce(gradients, variables), variables, strict=True))

    def _allreduce(self, grads: Iterable[Any], vars: Iterable[Any]) -> list[Any]:
        """Combine gradients over the ranks, except with accumulation. See `_compute_gradients`."""
        gradients, variables = list(grads), list(vars)
        if self._accumulates():
            return gradients
        combined = self._hvdlite.combine(variables, gradients)
        object.__setattr__(self, "_horovod_combined", combined)
        return combined

    def _accumulates(self) -> bool:
        inner: Any = self
        while isinstance(inner, keras.optimizers.LossScaleOptimizer):
            inner = inner.inner_optimizer
        return bool(inner.gradient_accumulation_steps)

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """Apply gradients. Combine them before, unless they come from `_compute_gradients` or `_allreduce`."""
        gradients = list(grads)
        if is_known(gradients, self.__dict__.get("_horovod_combined", ())):
            super(DistributedKerasOptimizer, self).apply(gradients, trainable_variables)
        else:
            super().apply(gradients, trainable_variables)


def is_known(gradients: Sequence[Any], known: Sequence[Any]) -> bool:
    """Return whether these are the same objects as the gradients that were combined last, and at least one."""
    return len(gradients) == len(known) > 0 and all(one is each for one, each in zip(gradients, known, strict=True))


def let_keras_take() -> None:
    """Let Keras 3 accept what programs for Horovod pass to it. This changes Keras for the whole process, once."""
    if hasattr(Trainer.compile, "_hvdlite_plain"):
        return
    Trainer.compile = _without_dropped(Trainer.compile)
    for kind in (BaseOptimizer, keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer):
        plain = vars(kind)["variables"].fget
        kind.variables = property(functools.wraps(plain)(functools.partial(_callable_variables, plain)))


def _callable_variables(plain: Callable[[Any], list[Any]], optimizer: Any) -> CallableList:
    return CallableList(plain(optimizer))


def _without_dropped(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.pop(_DROPPED, None) is not None:
            warnings.warn(
                f"hvdlite: compile({_DROPPED}=…) has no meaning in Keras 3, and is left out.", UserWarning, stacklevel=2
            )
        return plain(self, *args, **kwargs)

    compile._hvdlite_plain = plain  # type: ignore[attr-defined]
    return compile
