"""A Keras model for ``hvdlite serve``, of Keras 3 or tf_keras. Nothing of either is imported before it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike, fspath
from typing import Any

import numpy as np

from hvdlite.errors import ArgumentError
from hvdlite.protocols import Array
from hvdlite.serving.servable import Servable, by_input


def servable(
    model: Any,
    example: Any = None,
    *,
    weights: str | PathLike[str] | None = None,
    dtype: Any = None,
    shape: Sequence[int | None] | None = None,
    pad: Callable[[list[Array]], Any] | None = None,
    allow_nan: bool = False,
) -> Servable:
    """Make a Keras model ready for ``hvdlite serve``: it computes by `predict_on_batch`, in inference mode.

    Args:
        model: A model with one input, of Keras 3 or tf_keras; or the path of a file that ``model.save`` of Keras 3 has written.
        example: One input, without the batch. Replicas warm up with it. A model that is not built is built by it.
        weights: A file that ``model.save_weights`` has written.
        dtype: The dtype of inputs; that of the model's input if it is not given.
        shape: The shape of one input, without the batch; None stands for any length there. That of the model's input if it is
            not given.
        pad: If it is given, batches mix inputs of different shapes: `pad` gets a list of arrays, and the model what it returns.
        allow_nan: Whether NaN and infinities in inputs are allowed.

    Returns:
        What a module gives a name for ``hvdlite serve module:name``.

    Raises:
        ArgumentError: `model` is no Keras model, it has several inputs, or an argument is not of its type.

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
    if example is not None and not model.built:
        model(np.asarray(example)[np.newaxis])
    inputs = getattr(model, "inputs", None) or []
    if len(inputs) > 1:
        raise ArgumentError(
            f"servable: the model has {len(inputs)} inputs: expected one. Serve a function that takes a list of dictionaries "
            "and calls the model."
        )
    if inputs and example is None:
        found = inputs[0].dtype
        dtype = getattr(found, "name", found) if dtype is None else dtype
        shape = tuple(inputs[0].shape)[1:] if shape is None and pad is None else shape
    if weights is not None:
        if not model.built:
            raise ArgumentError(f"weights={fspath(weights)!r}: the model is not built: give an example of one input.")
        model.load_weights(fspath(weights))

    def predict(batch: Any) -> Any:
        if isinstance(batch, list):
            raise ArgumentError(
                "the inputs of a batch are no arrays of one shape: give hvd.servable a dtype=, or pad=."
            )
        return by_input(model.predict_on_batch(batch), np.asarray)

    return Servable(predict, dtype=dtype, shape=shape, pad=pad, example=example, allow_nan=allow_nan)
