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
    once. Sizes may differ: of batches, and of what a model takes in any size. A rank without data is not asked.

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

    def _check_and_train(self, iterator: Any) -> Any:
        train = self._train
        self._restore()
        specs = [
            None if spec is None else (type(spec).__name__, spec.dtype.name, spec.shape.rank)
            for spec in tf.nest.flatten(getattr(iterator, "element_spec", None))
        ]
        everybody = hvdlite.allgather_object(specs, process_set=self._process_set)
        known = [(rank, other) for rank, other in enumerate(everybody) if other is not None]
        first, wanted = known[0]
        for rank, other in known:
            if other != wanted:
                raise MismatchError(
                    f"the ranks have data of different kinds: a batch is {_describe(wanted)} on rank {first}, and "
                    f"{_describe(other)} on rank {rank}."
                )
        return train(iterator)


def _describe(specs: list[Any]) -> str:
    return " and ".join("nothing known" if spec is None else f"{spec[1]} with {spec[2]} dimensions" for spec in specs)
