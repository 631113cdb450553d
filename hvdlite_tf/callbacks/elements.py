"""The data of all ranks is of one kind."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import hvdlite
from hvdlite import ProcessSet
from hvdlite.errors import MismatchError
from hvdlite_tf.callbacks.base import Callback


class SameElementsCallback(Callback):
    """Compares the ranks' batches before the first step of `fit`: their structure, dtypes and numbers of dimensions.

    A callback does not see the data; Keras hands it to ``model.train_function``, which is another one until it has been called
    once. On TensorFlow that is an iterator, which says what it yields; on torch it is the batch. Sizes may differ: of batches,
    and of what a model takes in any size. A rank without data is not asked.

    Args:
        process_set: The ranks that train together; all by default.
    """

    def __init__(self, *, process_set: ProcessSet | None = None) -> None:
        super().__init__()
        self._process_set = process_set
        self._train: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Be there for the first step."""
        self._train, self.model.train_function = self.model.train_function, self._check_and_train

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """There may have been no step."""
        self._restore()

    def _restore(self) -> None:
        if self._train is not None:
            self.model.train_function, self._train = self._train, None

    def _check_and_train(self, data: Any) -> Any:
        train = self._train
        self._restore()
        batch = None if hasattr(data, "__next__") else data
        specs = [_spec(each) for each in tf.nest.flatten(getattr(data, "element_spec", batch))]
        everybody = hvdlite.allgather_object(specs, process_set=self._process_set)
        known = [(rank, other) for rank, other in enumerate(everybody) if other is not None]
        first, wanted = known[0]
        for rank, other in known:
            if other != wanted:
                raise MismatchError(
                    f"the ranks have data of different kinds: a batch is {_describe(wanted)} on rank {first}, and "
                    f"{_describe(other)} on rank {rank}."
                )
        return train(data)


def _spec(tensor: Any) -> tuple[str, str, int | None] | None:
    """What the ranks have to agree on; the number of dimensions is None if it is not known."""
    if tensor is None or not hasattr(tensor, "shape"):
        return None
    dimensions = tensor.shape.rank if isinstance(tensor.shape, tf.TensorShape) else len(tensor.shape)
    return type(tensor).__name__, str(getattr(tensor.dtype, "name", tensor.dtype)).removeprefix("torch."), dimensions


def _describe(specs: list[Any]) -> str:
    return " and ".join("nothing known" if spec is None else f"{spec[1]} with {spec[2]} dimensions" for spec in specs)
