"""Datasets of global batches, of which each rank sees its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from hvdlite_tf.data import rows_of_batches
from hvdlite_tf.order import check_order

_OFF = tf.data.experimental.AutoShardPolicy.OFF


class DistributedDataset(tf.distribute.DistributedDataset):  # type: ignore[misc]  # mypy does not see TensorFlow
    """A rank's share of a dataset. Its elements are plain tensors, and its iterators those of `tf.data`.

    Args:
        dataset: The share.
    """

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self._dataset)
        return iterator

    @property
    def element_spec(self) -> Any:
        """Dtypes and shapes of this rank's elements."""
        return self._dataset.element_spec

    @property
    def cardinality(self) -> Any:
        """The number of batches, as tf.data has it; a NumPy int64."""
        return self._dataset.cardinality().numpy()

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Fold a function over the elements. AutoGraph makes this of a ``for`` loop over the dataset in a tf.function.

        Args:
            initial_state: Nested tensors.
            reduce_func: Makes the next state of a state and an element.
        """
        iterator: Any = iter(self)

        def has_element(element: Any, state: Any) -> tf.Tensor:
            return element.has_value()

        def step(element: Any, state: Any) -> tuple[Any, Any]:
            state = reduce_func(state, element.get_value())
            return iterator.get_next_as_optional(), state

        first = iterator.get_next_as_optional()
        _, state = tf.while_loop(has_element, step, [first, initial_state], parallel_iterations=1)
        return state


def distribute(dataset: tf.data.Dataset, rank: int, size: int) -> DistributedDataset:
    """This rank's rows of each batch of a dataset that all ranks have; all of it, if it is not to be sharded.

    Args:
        dataset: Of global batches. Where its options say ``auto_shard_policy = OFF``, of this rank's batches.
        rank, size: Which rank, of how many.

    Raises:
        ArgumentError: The ranks shuffle it differently.
        MismatchError: The ranks have different datasets.
        UnsupportedTensorError: It has no batches.
    """
    if isinstance(dataset, DistributedDataset):
        return dataset
    if dataset.options().experimental_distribute.auto_shard_policy == _OFF:
        return DistributedDataset(dataset)
    check_order(dataset, "the strategy's dataset")
    return DistributedDataset(rows_of_batches(dataset, rank, size, "uneven").prefetch(tf.data.AUTOTUNE))
