"""What differs between the backends of Keras 3 for an optimizer that exchanges gradients: one object for each."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import keras

from hvdlite.adapter.eager_sync import EagerSync
from hvdlite.adapter.identity import Identity
from hvdlite.adapter.options import Options
from hvdlite.errors import ArgumentError
from hvdlite_tf.gradients.optimizer_sync import Exchange
from hvdlite_tf.variables import plain_variable

Function = TypeVar("Function", bound=Callable[..., Any])


class Weight(Protocol):
    """The number of samples that a step's gradients are the mean of."""

    def assign(self, value: float) -> Any:
        """Take another number."""
        ...


class Backend(Protocol):
    """What an optimizer needs of a backend."""

    def exchange(self, options: Options, identity: Identity) -> Exchange:
        """An exchange for the optimizer of this identity."""
        ...

    def weight(self) -> Weight:
        """One that is 1, which this backend's exchange takes."""
        ...

    def untraced(self, function: Function) -> Function:
        """`function`, which the backend's compiler is to call as it is, and not to rewrite."""
        ...


class _TorchExchange(EagerSync):
    """`EagerSync` for the variables of Keras."""

    def combine(self, sources: Sequence[Any], gradients: Sequence[Any], weight: Any = None) -> list[Any]:
        return super().combine([plain_variable(source) for source in sources], gradients, weight)

    def fill(self, sources: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        return super().fill([plain_variable(source) for source in sources], gradients)


class _Torch:
    """Steps are eager."""

    def exchange(self, options: Options, identity: Identity) -> Exchange:
        return _TorchExchange(options, identity)

    def weight(self) -> Weight:
        return _Number()

    def untraced(self, function: Function) -> Function:
        torch: Any = sys.modules["torch"]  # Keras has imported it; this package can do without
        found: Function = torch.compiler.disable(function)
        return found


class _Number:
    """A weight in eager code."""

    def __init__(self) -> None:
        self._value = 1.0

    def assign(self, value: float) -> None:
        self._value = float(value)

    def __float__(self) -> float:
        return self._value


def current() -> Backend:
    """The one that Keras runs on.

    Raises:
        ArgumentError: hvdlite does not serve it.
    """
    name = keras.backend.backend()
    if name == "tensorflow":  # imported where it is in use: Keras on torch does without
        tensorflow: Backend = importlib.import_module("hvdlite_tf.optimizers.on_tensorflow").TensorFlow()
        return tensorflow
    if name != "torch":
        why = " (there, Keras compiles whole steps, which gradients do not leave)" if name == "jax" else ""
        raise ArgumentError(
            f"hvdlite serves Keras on TensorFlow and on torch; its backend is {name}{why}. Set KERAS_BACKEND=tensorflow or "
            "KERAS_BACKEND=torch before Keras is imported."
        )
    return _Torch()
