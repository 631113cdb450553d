"""Local variables, which each rank has for itself: their gradients are not exchanged.

An example is the part of a model that differs between the ranks (expert or table parallelism), while the rest is replicated::

    gradients ─▶ split ─▶ of shared variables ─▶ exchange ─▶ merge ─▶ gradients in their old order
                      └─▶ of local variables ──▶ × 1/size ───▶┘
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
    """The local variables of an optimizer or a tape.

    The loss of data-parallel training is the mean of the ranks' losses, and a local variable affects only the loss of its own
    rank. So its gradient is the gradient of that rank's loss divided by the number of ranks.

    Args:
        scale: Whether the gradients of local variables are divided by the number of ranks.
        process_set: The ranks that are counted; None means all ranks.
    """

    def __init__(self, scale: bool = True, process_set: ProcessSet | None = None) -> None:
        self._scale = scale
        self._process_set = process_set
        # The keys are identities, because Keras' variables compare by value and have no ref().
        self._registered: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._registered)

    def __contains__(self, variable: Any) -> bool:
        return id(plain_variable(variable)) in self._registered

    def register(self, var: Any) -> None:
        """Keep the gradient of `var` on this rank. Every rank registers the variables at the same positions of its model.

        Args:
            var: A variable of TensorFlow or Keras; for a tape also a tensor.

        Raises:
            ArgumentError: `var` is something else.
        """
        plain = plain_variable(var)
        if not _is_tensor(plain) and not isinstance(var, keras.Variable):
            raise ArgumentError(f"expected a variable to keep local; got {type(var).__name__}.")
        self._registered[id(plain)] = plain

    def register_layers(self, layers: Any) -> None:
        """Register all trainable variables of layers.

        Args:
            layers: A layer or model of Keras, or several.

        Raises:
            ArgumentError: An element is not a layer, or has no variables yet.
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
        """Combine the gradients of shared variables: call `split`, `combine` and `merge`.

        Args:
            combine: A function of variables and their gradients that returns the combined gradients, in the same order.
            variables, gradients: See `split`.

        Returns:
            The gradients of all variables, in their order.
        """
        return self.merge(variables, gradients, combine(*self.split(variables, gradients)))

    def change_others(
        self, change: Callable[[list[Any], list[Any]], list[Any]], variables: Sequence[Any], gradients: Sequence[Any]
    ) -> list[Any]:
        """Apply a function to the gradients of shared variables, and keep the gradients of local variables unchanged."""
        changed = iter(change(*self.split(variables, gradients)))
        return [g if variable in self else next(changed) for variable, g in zip(variables, gradients, strict=True)]

    def split(self, variables: Sequence[Any], gradients: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the variables that are not local, and their gradients.

        Args:
            variables: Variables of TensorFlow or Keras, or tensors.
            gradients: A dense tensor, a tf.IndexedSlices or None for each variable.
        """
        shared = [pair for pair in zip(variables, gradients, strict=True) if pair[0] not in self]
        return [variable for variable, _ in shared], [gradient for _, gradient in shared]

    def merge(self, variables: Sequence[Any], gradients: Sequence[Any], combined: Sequence[Any]) -> list[Any]:
        """Return the gradients of all variables in order: combined ones of shared variables, this rank's own of local ones.

        Args:
            variables, gradients: The arguments of `split`.
            combined: The combined gradients of the variables that `split` returned.
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
        """Return 1 ÷ the number of ranks; in a tf.function a tensor, because it may run in a job of another size."""
        tf = tensorflow()
        if tf is None:
            return 1 / size_of(self._process_set)
        from hvdlite_tf.ops.rank_ops import size_when_it_runs

        size = size_when_it_runs(self._process_set)
        return 1 / tf.cast(size, dtype) if tf.is_tensor(size) else 1 / size


def _is_tensor(value: Any) -> bool:
    tf = tensorflow()
    return is_variable(value) or (tf is not None and isinstance(value, tf.Tensor))
