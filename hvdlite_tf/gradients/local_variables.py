"""Variables that each rank has for itself: their gradients are not exchanged.

Such as the part of a model that differs between the ranks (expert or table parallelism), while the rest is replicated::

    gradients ─▶ split ─▶ those of shared variables ─▶ exchange ─▶ merge ─▶ gradients, in the order that they had
                      └─▶ those of local variables ─▶ × 1/size ───▶┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras

from hvdlite import ProcessSet
from hvdlite.adapter.arguments import size_of
from hvdlite.errors import ArgumentError
from hvdlite_tf.variables import is_variable, plain_variable, tensorflow, times


class LocalVariables:
    """Which of an optimizer's or a tape's variables are local to the ranks.

    The loss of data-parallel training is the mean of the ranks' losses, and a local variable has an influence on the loss of
    its own rank only: so its gradient is that of the rank's loss divided by the number of ranks.

    Args:
        scale: Divide gradients of local variables by the number of ranks; if not, they stay as they are.
        process_set: The ranks that are counted; all by default.
    """

    def __init__(self, scale: bool = True, process_set: ProcessSet | None = None) -> None:
        self._scale = scale
        self._process_set = process_set
        # By identity: Keras' variables compare by value, and have no ref().
        self._registered: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._registered)

    def __contains__(self, variable: Any) -> bool:
        return id(plain_variable(variable)) in self._registered

    def register(self, var: Any) -> None:
        """Keep the gradient of `var` on this rank from now on. Every rank registers variables in the same places of its model.

        Args:
            var: A variable of TensorFlow or Keras; for a tape a tensor too.

        Raises:
            ArgumentError: It is neither.
        """
        plain = plain_variable(var)
        if not _is_tensor(plain) and not isinstance(var, keras.Variable):
            raise ArgumentError(f"expected a variable to keep local; got {type(var).__name__}.")
        self._registered[id(plain)] = plain

    def register_layers(self, layers: Any) -> None:
        """Register all trainable variables of layers.

        Args:
            layers: A layer of Keras (a model too), or several.

        Raises:
            ArgumentError: One of them is no layer, or has no variables yet.
        """
        for layer in layers if isinstance(layers, Iterable) else [layers]:
            if not hasattr(layer, "trainable_weights") or not hasattr(layer, "built"):
                raise ArgumentError(f"local_layers: expected layers of Keras; got {type(layer).__name__}.")
            if not layer.built:
                raise ArgumentError(
                    f"local_layers: layer {layer.name!r} has no variables yet: build the model (or call it once) first."
                )
            for variable in layer.trainable_weights:
                self.register(variable)

    def exchange_others(
        self, combine: Callable[[list[Any], list[Any]], list[Any]], variables: Sequence[Any], gradients: Sequence[Any]
    ) -> list[Any]:
        """`split`, an exchange, and `merge`.

        Args:
            combine: Called with variables and their gradients; returns combined gradients, in their order.
            variables, gradients: As for `split`.
        """
        return self.merge(variables, gradients, combine(*self.split(variables, gradients)))

    def change_others(
        self, change: Callable[[list[Any], list[Any]], list[Any]], variables: Sequence[Any], gradients: Sequence[Any]
    ) -> list[Any]:
        """As `exchange_others`, for what is no exchange yet: gradients of local variables stay as they are."""
        changed = iter(change(*self.split(variables, gradients)))
        return [g if variable in self else next(changed) for variable, g in zip(variables, gradients, strict=True)]

    def split(self, variables: Sequence[Any], gradients: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """What is to be exchanged: the variables that are not local, and their gradients.

        Args:
            variables: Of TensorFlow or Keras, or tensors.
            gradients: Of each a dense tensor, IndexedSlices, or None.
        """
        shared = [pair for pair in zip(variables, gradients, strict=True) if pair[0] not in self]
        return [variable for variable, _ in shared], [gradient for _, gradient in shared]

    def merge(self, variables: Sequence[Any], gradients: Sequence[Any], combined: Sequence[Any]) -> list[Any]:
        """All gradients in order: combined ones of shared variables, this rank's own of local ones.

        Args:
            variables, gradients: As given to `split`.
            combined: What the exchange made of the gradients that `split` returned.
        """
        exchanged = iter(combined)
        return [
            self._share_of(gradient) if variable in self else next(exchanged)
            for variable, gradient in zip(variables, gradients, strict=True)
        ]

    def _share_of(self, gradient: Any) -> Any:
        if gradient is None or not self._scale:
            return gradient
        return times(gradient, self._factor(gradient.dtype))

    def _factor(self, dtype: Any) -> Any:
        """One by the number of ranks: in a tf.function as a tensor of this dtype, for it may run in a job of another size."""
        tf = tensorflow()
        if tf is None:
            return 1 / size_of(self._process_set)
        from hvdlite_tf.ops.rank_ops import size_when_it_runs

        size = size_when_it_runs(self._process_set)
        return 1 / tf.cast(size, dtype) if tf.is_tensor(size) else 1 / size


def _is_tensor(value: Any) -> bool:
    tf = tensorflow()
    return is_variable(value) or (tf is not None and isinstance(value, tf.Tensor))
