"""`load_model`: loads a saved model and makes its optimizer a distributed one again."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from hvdlite.gradients.aggregator import Aggregator
from hvdlite.tensors.compression import Compression, Compressor
from hvdlite_tf.keras.optimizers import DistributedOptimizer
from hvdlite_tf.variables import is_installed


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Iterable[type[Any]] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Compressor | Aggregator = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a saved model on any number of ranks, and make its optimizer a distributed one.

    A saved model has the plain optimizer and nothing of hvdlite, so ``keras.models.load_model`` can load it as well. Rank 0
    alone may load the model if the other ranks build the same model: BroadcastGlobalVariablesCallback (or Distributed) gives
    them the weights and the optimizer state.

    Args:
        filepath: The file that ``model.save`` wrote.
        custom_optimizers: Classes of optimizers that Keras does not know.
        custom_objects: Other classes and functions, by the names under which they were saved.
        compression: See `DistributedOptimizer`.
        legacy_opts: Horovod's argument, which has no effect: both kinds of tf_keras' optimizers are known.

    Returns:
        A model of the Keras that ``tf.keras`` is; of Keras 3 if TensorFlow is not installed. A model that was saved without an
        optimizer has none.

    Raises:
        ValueError: Keras cannot load the file.
        NotInitializedError: `init` has not been called.

    Examples:
        >>> import tempfile
        >>> def rate(path):
        ...     if hvd.rank() == 0:
        ...         model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ...         model.compile(keras.optimizers.SGD(0.25), "mse")
        ...         model.save(path)
        ...     hvd.barrier()
        ...     return hvd.load_model(path).optimizer.learning_rate.numpy().item()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     on_ranks(2, rate, f"{folder}/model.keras")
        [0.25, 0.25]
    """
    known = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = _keras_of_tensorflow().models.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model


def _keras_of_tensorflow() -> Any:
    """Return the Keras that ``tf.keras`` is, which may be tf_keras; Keras 3 if TensorFlow is not installed."""
    return importlib.import_module("tensorflow").keras if is_installed() else keras
