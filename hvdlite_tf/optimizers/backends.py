"""The backends of Keras 3: one object for each has what a distributed optimizer needs of its backend."""

from __future__ import annotations

import contextlib
import importlib
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras

from hvdlite.adapter.eager_sync import EagerSync
from hvdlite.adapter.identity import Identity
from hvdlite.adapter.options import ExchangeOptions
from hvdlite.errors import ArgumentError
from hvdlite.protocols import Array, TensorInfo
from hvdlite_tf.gradients.optimizer_sync import GradientCombiner
from hvdlite_tf.variables import plain_variable

Function = Callable[..., Sequence[Array]]


class Weight(Protocol):
    """The number of samples whose mean a step's gradients are."""

    def assign(self, value: float) -> Any:
        """Set the number."""
        ...


class Backend(Protocol):
    """The functions of a backend that a distributed optimizer needs."""

    def exchange(self, options: ExchangeOptions, identity: Identity) -> GradientCombiner:
        """Make the exchange of gradients for the optimizer of this identity."""
        ...

    def weight(self) -> Weight:
        """Make a weight of 1, in a form that the backend's exchange takes."""
        ...

    def call(
        self,
        function: Function,
        tensors: Sequence[Any],
        results: Sequence[TensorInfo | str],
        after: Sequence[Any] = (),
    ) -> list[Any]:
        """Call a function of arrays in its place in the program, also where the program is compiled.

        Args:
            function: A function of arrays that it does not keep and does not change. It returns arrays that nobody changes
                afterwards.
            tensors: Tensors of the backend.
            results: The dtype and shape of each array that the function returns; a dtype alone if the shape differs from call
                to call.
            after: Tensors without which the function is not called. (In a function that asks for a batch where there is none,
                TensorFlow runs all that needs no batch.)

        Returns:
            What the function returns, as tensors of the backend.
        """
        ...

    def after(self, tensors: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager: what its body does to variables is not done without these tensors, also in a function.

        (See `after` of `call`: Keras would count a step without a batch.)
        """
        ...

    def shield(self, optimizer: Any) -> None:
        """Let the backend's compiler call the `apply` of a distributed optimizer, and not rewrite it."""
        ...


class _TorchExchange(EagerSync):
    """`EagerSync` for the variables of Keras."""

    def combine(self, sources: Sequence[Any], gradients: Sequence[Any], weight: Any = None) -> list[Any]:
        return super().combine([plain_variable(source) for source in sources], gradients, weight)

    def fill(self, sources: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        return super().fill([plain_variable(source) for source in sources], gradients)


class _Torch:
    """The backend torch, whose training steps are eager."""

    def exchange(self, options: ExchangeOptions, identity: Identity) -> GradientCombiner:
        return _TorchExchange(options, identity)

    def weight(self) -> Weight:
        return _Number()

    def call(
        self,
        function: Function,
        tensors: Sequence[Any],
        results: Sequence[TensorInfo | str],
        after: Sequence[Any] = (),
    ) -> list[Any]:
        return [*map(keras.ops.convert_to_tensor, function(*map(keras.ops.convert_to_numpy, tensors)))]

    def after(self, tensors: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def shield(self, optimizer: Any) -> None:
        """Give the object an `apply` of its own.

        torch's compiler looks for methods in `__class__`, which is the plain class for the sake of saved files. So the compiler
        would compile the plain `apply`, without the exchange.
        """
        torch: Any = sys.modules["torch"]  # Keras has imported torch; this package does not import it
        reference = weakref.ref(optimizer)

        def apply(*args: Any, **kwargs: Any) -> Any:
            own: Any = reference()  # never None, because the caller holds the optimizer
            return type(own).apply(own, *args, **kwargs)

        # A plain assignment would make Keras track the function.
        object.__setattr__(optimizer, "apply", torch.compiler.disable(apply))


class _Number:
    """A weight in eager code."""

    def __init__(self) -> None:
        self._value = 1.0

    def assign(self, value: float) -> None:
        self._value = float(value)

    def __float__(self) -> float:
        return self._value


def current() -> Backend:
    """Return the backend that Keras runs on.

    Raises:
        ArgumentError: hvdlite does not support it.
    """
    name = keras.backend.backend()
    if name == "tensorflow":  # imported only here, because Keras on torch does not need TensorFlow
        tensorflow: Backend = importlib.import_module("hvdlite_tf.optimizers.on_tensorflow").TensorFlow()
        return tensorflow
    if name != "torch":
        why = " (there, Keras compiles whole steps, which gradients do not leave)" if name == "jax" else ""
        raise ArgumentError(
            f"hvdlite serves Keras on TensorFlow and on torch; its backend is {name}{why}. Set KERAS_BACKEND=tensorflow or "
            "KERAS_BACKEND=torch before Keras is imported."
        )
    return _Torch()
