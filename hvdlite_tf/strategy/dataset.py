"""Datasets of global batches, of which each rank sees its rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import hvdlite
from hvdlite.protocols import Array
from hvdlite_tf.data.shard import rows_of_batches
from hvdlite_tf.data.shuffle_check import check_order, seeds_of
from hvdlite_tf.ops.ordered import as_written, ordered

_OFF = tf.data.experimental.AutoShardPolicy.OFF
_DEPTH = 8
"""Calls between Keras' building of a model and the iteration for it; there are three."""
_IGNORE = 1
"""TensorFlow's number for: state that cannot be saved, such as that of a random operation in a `map`, is left as it is."""


class DistributedDataset(tf.distribute.DistributedDataset):  # type: ignore[misc]  # mypy does not see TensorFlow
    """A rank's share of a dataset. Its elements are plain tensors, and its iterators those of `tf.data`.

    Every rank begins to read it at once. It is then read in rank 0's order: that of a shuffle depends on how often it was read
    before, and a rank may have looked at it alone.

    Args:
        dataset: The share.
        shuffles: Whether it shuffles global batches, or what they are made of.
    """

    def __init__(self, dataset: tf.data.Dataset, shuffles: bool = False) -> None:
        self._dataset = dataset
        self._shuffles = shuffles
        self._begun: _Begun | None = None

    def __iter__(self) -> Iterator[Any]:
        begun, self._begun = self._begun, None
        if begun is not None:
            return begun.again()
        iterator: Iterator[Any] = iter(self._dataset)
        if self._shuffles:
            in_order_of_rank_0(iterator)
        if _looks_only():
            self._begun = _Begun(iterator)
            return self._begun
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


class _Begun:
    """An iterator of which Keras wants the first element, to build a model by; then it begins anew.

    Generators cannot begin anew, so what was read is given once more.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator: Any = iterator
        self._first: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._first.append(next(self._iterator))
        return self._first[-1]

    get_next = __next__

    def again(self) -> Iterator[Any]:
        """All elements, from the first on."""
        rest = tf.data.Dataset.counter().map(as_written(lambda _: self._iterator.get_next_as_optional()))
        there = rest.take_while(as_written(lambda each: each.has_value()))
        whole = there.map(as_written(lambda each: each.get_value()))
        for element in reversed(self._first):
            whole = tf.data.Dataset.from_tensors(element).concatenate(whole)
        iterator: Iterator[Any] = iter(whole)
        vars(iterator)["_hvdlite_source"] = self._iterator  # which is closed with its Python object
        return iterator


def _looks_only() -> bool:
    """Whether Keras is about to build a model from the first element, and will read the data from the beginning after that."""
    frame = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if frame.f_code.co_name.endswith("_symbolic_build"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def in_order_of_rank_0(iterator: Any) -> None:
    """Put an iterator that has just been made into the state of rank 0's. Every rank calls this, in a tf.function too."""
    resource = iterator._iterator_resource
    state = tf.raw_ops.SerializeIterator(resource_handle=resource, external_state_policy=_IGNORE)
    text = tf.raw_ops.SerializeTensor(tensor=state)

    def shared(own: Array) -> list[Array]:
        return [np.asarray(hvdlite.broadcast_object(own.item(), 0), object)]

    (common,) = ordered(shared, [text], [tf.TensorSpec((), tf.string)])
    tf.raw_ops.DeserializeIterator(
        resource_handle=resource, serialized=tf.raw_ops.ParseTensor(serialized=common, out_type=tf.variant)
    )


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
    share = rows_of_batches(dataset, rank, size, "uneven").prefetch(tf.data.AUTOTUNE)
    return DistributedDataset(share, size > 1 and any(seeds_of(dataset)))
