"""A Keras model for ``hvdlite serve``, of Keras 3 or tf_keras. Nothing of either is imported before it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from typing import Any

import numpy as np

from hvdlite.errors import ArgumentError
from hvdlite.protocols import Array
from hvdlite.serving.servable import Inputs, Servable, by_input


def servable(
    model: Any,
    example: Any = None,
    *,
    weights: str | PathLike[str] | None = None,
    dtype: Any = None,
    shape: Sequence[int | None] | None = None,
    pad: Callable[[list[Array]], Any] | None = None,
    allow_nan: bool = False,
    inputs: Inputs | None = None,
) -> Servable:
    """Make a Keras model ready for ``hvdlite serve``: it computes by `predict_on_batch`, in inference mode.

    Args:
        model: A model of Keras 3 or tf_keras; or the path of a file that ``model.save`` of Keras 3 has written.
            If it has several inputs, or a dictionary of them, an input has an array for each, by their names.
        example: One input, without the batch. Replicas warm up with it. A model that is not built is built by it.
        weights: A file that ``model.save_weights`` has written.
        dtype: The dtype of inputs; that of the model's input if it is not given.
        shape: The shape of one input, without the batch; None stands for any length there. That of the model's input if it is
            not given.
        pad: If it is given, batches mix inputs of different shapes: `pad` gets a list of arrays, and the model what it returns.
        allow_nan: Whether NaN and infinities in inputs are allowed.
        inputs: If an input has several arrays: their names, each with its dtype and shape. Those of the model's inputs if this
            is not given. A model of your own class gets a dictionary of batches.

    Returns:
        What a module gives a name for ``hvdlite serve module:name``.

    Raises:
        ArgumentError: `model` is no Keras model, it has other inputs, or an argument is not of its type.

    Examples:
        >>> layer = keras.layers.Dense(1, use_bias=False, kernel_initializer=keras.initializers.Constant(2.0))
        >>> served = hvd.servable(keras.Sequential([keras.Input((1,)), layer]))
        >>> print(served.spec)
        an array of float32, shape (1,)
        >>> served(np.array([[1.0], [3.0]], np.float32)).tolist()
        [[2.0], [6.0]]
    """
    if isinstance(model, str | PathLike):
        import keras

        model = keras.saving.load_model(fspath(model), compile=False)
    if not callable(getattr(model, "predict_on_batch", None)):
        raise ArgumentError(f"servable({model!r}): expected a Keras model. For a function, use hvdlite.servable.")
    of_model = _inputs_of(model)
    is_list = False
    if len(of_model) > 1 or isinstance(getattr(model, "input", None), Mapping):
        names = ", ".join(map(repr, of_model))
        if example is not None or dtype is not None or shape is not None:
            raise ArgumentError(
                f"servable: dtype=, shape= or example=: the model has the inputs {names}: give inputs= if theirs is not right."
            )
        inputs = {name: _dtype_and_shape(each) for name, each in of_model.items()} if inputs is None else inputs
        if isinstance(inputs, Mapping) and sorted(inputs) != sorted(of_model):
            found = ", ".join(map(repr, inputs))
            raise ArgumentError(f"servable: inputs= has {found}: expected those of the model, {names}.")
        is_list = not isinstance(model.input, Mapping)
    elif of_model and example is None and inputs is None:
        its_dtype, its_shape = _dtype_and_shape(*of_model.values())
        dtype = its_dtype if dtype is None else dtype
        shape = its_shape if shape is None and pad is None else shape

    def predict(batch: Any) -> Any:
        if isinstance(batch, list) and pad is None:
            raise ArgumentError(
                "the inputs of a batch are no arrays of one shape: give hvd.servable a dtype=, or pad=."
            )
        if is_list and isinstance(batch, Mapping):
            batch = [batch[name] for name in of_model]
        return by_input(model.predict_on_batch(batch), np.asarray)

    about: dict[str, Any] = {"dtype": dtype, "shape": shape, "example": example, "inputs": inputs}
    served = Servable(predict, pad=pad, allow_nan=allow_nan, **about)
    if not model.built and served.example is not None:
        served([served.example] if inputs or pad else served.example[np.newaxis])
    if weights is not None:
        if not model.built:
            raise ArgumentError(
                f"weights={fspath(weights)!r}: the model is not built: give an example of one input, or a shape that is known."
            )
        model.load_weights(fspath(weights))
    return served


def _inputs_of(model: Any) -> dict[str, Any]:
    """Return the inputs of a model by name, in the order in which it takes them; none if they are not known."""
    struct = getattr(model, "input", None)  # a Sequential has none
    if isinstance(struct, Mapping):
        return dict(struct)
    return {each.name: each for each in getattr(model, "inputs", None) or []}


def _dtype_and_shape(tensor: Any) -> tuple[str, tuple[int | None, ...]]:
    return getattr(tensor.dtype, "name", tensor.dtype), tuple(tensor.shape)[1:]
