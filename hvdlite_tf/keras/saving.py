"""Saved models whose optimizer is distributed again."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from hvdlite.tensors.compression import Compression, Compressor
from hvdlite_tf.keras.optimizers import DistributedOptimizer
from hvdlite_tf.variables import is_installed


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Iterable[type[Any]] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Compressor = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a model that was saved, on any number of ranks, and make its optimizer a distributed one.

    A saved model has the plain optimizer and nothing of hvdlite, so ``keras.models.load_model`` loads it as well. It may be
    loaded on rank 0 alone if the others build the same model: BroadcastGlobalVariablesCallback (or Distributed) shares out the
    rest.

    Args:
        filepath: Where ``model.save`` put it.
        custom_optimizers: Classes of optimizers that Keras does not have.
        custom_objects: Other classes and functions, by the name that they were saved under.
        compression: As in `DistributedOptimizer`.
        legacy_opts: Horovod's. Means nothing here: both kinds of tf_keras' optimizers are known.

    Returns:
        The model, of the Keras that ``tf.keras`` is; of Keras 3 where TensorFlow is not installed.
        One that was saved without an optimizer has none.

    Raises:
        ValueError: As Keras' own function.
        NotInitializedError: Before `init`.
    """
    known = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = _keras_of_tensorflow().models.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model


def _keras_of_tensorflow() -> Any:
    """The Keras that ``tf.keras`` is, which may be tf_keras."""
    return importlib.import_module("tensorflow").keras if is_installed() else keras
