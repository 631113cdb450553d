"""Habits of the Keras of Horovod's time, for programs that run unmodified under `hvdlite.compat`.

For distributed optimizers (`KerasHabits`, `gradients_of`), and, by `let_keras_take`, for Keras itself: programs pass an
argument to ``model.compile`` that only Horovod needed once, and call ``optimizer.variables()`` of optimizers that they have not
wrapped.
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

from hvdlite_tf.optimizers.keras import Distributed

_DROPPED = "experimental_run_tf_function"


class CallableList(list[Any]):
    """``optimizer.variables`` was a method once, and is a list now: this is both."""

    def __call__(self) -> list[Any]:
        return self


def gradients_of(loss: Any, variables: Any, output_gradients: Any, tape: Any) -> list[tuple[Any, Any]]:
    """This rank's gradients, with their variables: what optimizers of Keras 2 had in ``_compute_gradients``.

    Args:
        loss: A tensor that `tape` has recorded; or a function that computes it, without arguments.
        variables: A list; or a function that returns one.
        output_gradients: What the gradients of the loss are multiplied by; None for 1.
        tape: A new one if None.

    Raises:
        ValueError: `loss` is a tensor and there is no tape.
    """
    if tape is None and not callable(loss):
        raise ValueError("`tape` is required when a `Tensor` loss is passed.")  # as Keras 2 says it
    tape = tf.GradientTape() if tape is None else tape
    if callable(loss):
        with tape:
            loss = loss()
    variables = variables() if callable(variables) else list(variables)
    return list(zip(tape.gradient(loss, variables, output_gradients), variables, strict=True))


class KerasHabits(Distributed):
    """``optimizer.variables()``, ``optimizer.lr`` and ``optimizer._compute_gradients``, as Keras 2 and Horovod had them."""

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
        """The gradients of all ranks, for `apply_gradients`. With accumulation this rank's own: updates combine them."""
        gradients, variables = zip(*gradients_of(loss, var_list, grad_loss, tape), strict=True)
        return list(zip(self._allreduce(gradients, variables), variables, strict=True))

    def _allreduce(self, grads: Iterable[Any], vars: Iterable[Any]) -> list[Any]:
        """As `_compute_gradients`, of gradients that are there."""
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
        """Apply gradients, and combine them first unless they come from `_compute_gradients` or `_allreduce`."""
        gradients = list(grads)
        if is_known(gradients, self.__dict__.get("_horovod_combined", ())):
            super(Distributed, self).apply(gradients, trainable_variables)
        else:
            super().apply(gradients, trainable_variables)


def is_known(gradients: Sequence[Any], known: Sequence[Any]) -> bool:
    """Whether these are the very gradients that were combined last, and there are some."""
    return len(gradients) == len(known) > 0 and all(one is each for one, each in zip(gradients, known, strict=True))


def let_keras_take() -> None:
    """Let Keras 3 take what programs for Horovod pass to it; for the whole process, once."""
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
