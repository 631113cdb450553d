"""A callback that checks that the data of all ranks has the same structure and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

import hvdlite
from hvdlite import ProcessSet
from hvdlite.errors import MismatchError
from hvdlite_tf.callbacks.base import Callback, ranks_of
from hvdlite_tf.variables import tensorflow


class SameElementsCallback(Callback):
    """Compares the ranks' batches before the first step of `fit`: their structure, dtypes and numbers of dimensions.

    A callback does not see the data, which Keras passes to ``model.train_function``. So this callback replaces that function
    until its first call. On TensorFlow the argument is an iterator, which knows the specs of its elements; on torch it is the
    batch. The sizes of dimensions may differ. A rank without data does not take part in the comparison.

    Args:
        process_set: The ranks that train together; None means all ranks.
    """

    def __init__(self, *, process_set: ProcessSet | None = None) -> None:
        super().__init__()
        self._process_set = process_set
        self._first_step: _FirstStep | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Wait for the first step."""
        self._first_step = _FirstStep(self.model, self._compare)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Put the model's function back, if the epoch had no step."""
        self._leave()

    def on_train_end(self, logs: Any = None) -> None:
        """Put the model's function back, if there was no epoch."""
        self._leave()

    def _leave(self) -> None:
        if self._first_step is not None:
            self._first_step.leave()
            self._first_step = None

    def _compare(self, data: Any) -> None:
        batch = None if hasattr(data, "__next__") else data
        specs = [_spec(each) for each in keras.tree.flatten(getattr(data, "element_spec", batch))]
        everybody = hvdlite.allgather_object(specs, process_set=self._process_set)
        ranks = ranks_of(self._process_set)
        known = [(rank, other) for rank, other in zip(ranks, everybody, strict=True) if other is not None]
        first, wanted = known[0]
        for rank, other in known:
            if other != wanted:
                raise MismatchError(
                    f"the ranks have data of different kinds: a batch is {_describe(wanted)} on rank {first}, and "
                    f"{_describe(other)} on rank {rank}."
                )


class _FirstStep:
    """A function that replaces a model's `train_function` until it is called, or until `leave`.

    Args:
        model: The model.
        look: A function that is called before the first step, with the step's data.
    """

    def __init__(self, model: Any, look: Callable[[Any], None]) -> None:
        left_behind = model.train_function
        if isinstance(left_behind, _FirstStep):  # from an earlier `fit` that another callback ended at once
            left_behind.leave()
        self._model, self._look, self._train = model, look, model.train_function
        model.train_function = self

    def leave(self) -> None:
        """Put the function back."""
        if self._model.train_function is self:
            self._model.train_function = self._train

    def __call__(self, data: Any) -> Any:
        self.leave()
        self._look(data)
        try:
            return self._train(data)
        except StopIteration:
            _build_metrics(self._model, data)
            raise
        except Exception as error:
            tf = tensorflow()
            if tf is not None and isinstance(error, tf.errors.OutOfRangeError):
                _build_metrics(self._model, data)
            raise


def _build_metrics(model: Any, iterator: Any) -> None:
    """Build the model's metrics on a rank without data. A traced step builds them; an eager step without data does not."""
    metrics = getattr(model, "_compile_metrics", None)
    if metrics is None or getattr(metrics, "built", True) or not hasattr(model, "_symbolic_build"):
        return
    tf: Any = tensorflow()  # the iterator is TensorFlow's
    batch = tf.nest.map_structure(
        lambda spec: tf.zeros([length or 1 for length in spec.shape], spec.dtype), iterator.element_spec
    )
    model._symbolic_build(data_batch=batch)


def _spec(tensor: Any) -> tuple[str, str, int | None] | None:
    """Return the properties of a tensor that must be equal on all ranks: its type, its dtype, its number of dimensions.

    The number of dimensions is None if it is not known. The result is None for objects that are not tensors.
    """
    if tensor is None or not hasattr(tensor, "shape"):
        return None
    dimensions = tensor.shape.rank if hasattr(tensor.shape, "rank") else len(tensor.shape)
    return type(tensor).__name__, str(getattr(tensor.dtype, "name", tensor.dtype)).removeprefix("torch."), dimensions


def _describe(specs: list[Any]) -> str:
    return " and ".join("nothing known" if spec is None else f"{spec[1]} with {spec[2]} dimensions" for spec in specs)
