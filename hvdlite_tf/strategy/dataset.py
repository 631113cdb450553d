"""Datasets of global batches, of which each rank reads its rows."""

from __future__ import annotations

import itertools
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdlite
from hvdlite.errors import ArgumentError
from hvdlite.protocols import Array
from hvdlite_tf.callbacks.checks import problem_of_backups
from hvdlite_tf.data.shard import rows_of_batches
from hvdlite_tf.data.shuffle_check import check_order, seeds_of
from hvdlite_tf.ops.ordered import as_written, ordered

_OFF = tf.data.experimental.AutoShardPolicy.OFF
_DEPTH = 8
"""The largest number of frames between Keras' building of a model and the iteration for it; there are three now."""
_IGNORE = 1
"""TensorFlow's external state policy IGNORE: state that cannot be saved, such as a random operation's in a `map`, is kept."""


class DistributedDataset(tf.distribute.DistributedDataset):  # type: ignore[misc]  # mypy does not see TensorFlow
    """A rank's share of a dataset. Its elements are plain tensors, and its iterators are those of `tf.data`.

    All ranks begin to read it together, and then read it in rank 0's order. (The order of a shuffle depends on how often the
    dataset was read before, and a rank may have read it alone.)

    Args:
        dataset: This rank's share.
        shuffles: Whether the dataset shuffles global batches, or the examples of which they consist.
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
        """The spec of this rank's elements."""
        return self._dataset.element_spec

    @property
    def cardinality(self) -> Any:
        """The number of batches, a NumPy int64; negative if it is not known or infinite, as in tf.data."""
        return self._dataset.cardinality().numpy()

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Fold a function over the elements. AutoGraph calls this for a ``for`` loop over the dataset in a tf.function.

        Args:
            initial_state: The first state, nested tensors.
            reduce_func: A function that returns the next state for a state and an element.

        Returns:
            The last state.
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
    """An iterator from which Keras reads the first element to build a model, before it reads all elements.

    A generator cannot begin again, so this iterator keeps the elements that were read and yields them once more.
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
        """Return an iterator over all elements, including those that were read."""
        rest = tf.data.Dataset.from_tensors(0).repeat().map(as_written(lambda _: self._iterator.get_next_as_optional()))
        there = rest.take_while(as_written(lambda each: each.has_value()))
        whole = there.map(as_written(lambda each: each.get_value()))
        for element in reversed(self._first):
            whole = tf.data.Dataset.from_tensors(element).concatenate(whole)
        iterator: Iterator[Any] = iter(whole)
        vars(iterator)["_hvdlite_source"] = self._iterator  # keeps it open: it is closed with its Python object
        return iterator


def _looks_only() -> bool:
    """Return whether Keras reads the first element only to build a model, and will read all elements after that."""
    callers = itertools.islice(traceback.walk_stack(sys._getframe(2)), _DEPTH)
    return any(frame.f_code.co_name.endswith("_symbolic_build") for frame, _ in callers)


def meet_before_keras_reads() -> None:
    """Let the ranks meet where Keras asks for the dataset of `fit`, `evaluate` or `predict`. Every rank calls this.

    The strategy knows neither the call nor its callbacks, so this looks for Keras' method among the callers. A rank that calls
    it alone reads so in the error, by the name of this meeting.

    Raises:
        ArgumentError: Several ranks give a `BackupAndRestore` of Keras 3 the same folder, to which each of them writes.
    """
    for frame, _ in traceback.walk_stack(sys._getframe()):
        package, method = frame.f_globals.get("__name__", "").partition(".")[0], frame.f_code.co_name
        if package in ("keras", "tf_keras") and method in ("fit", "evaluate", "predict"):
            given = frame.f_locals.get("callbacks") if method == "fit" and package == "keras" else None
            name = f"{method} of a model under hvd.Strategy, which all ranks call"
            if problem := problem_of_backups(keras.tree.flatten(getattr(given, "callbacks", given)), None, name):
                raise ArgumentError(problem)
            return


def in_order_of_rank_0(iterator: Any) -> None:
    """Give a new iterator the state of rank 0's iterator. Every rank calls this; it works in a tf.function too."""
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
    """Return a dataset of this rank's rows of each batch; the whole dataset if its options say that it is not sharded.

    Args:
        dataset: A dataset of global batches; with the option ``auto_shard_policy = OFF``, of this rank's batches.
        rank: This rank.
        size: The number of ranks.

    Raises:
        ArgumentError: The ranks shuffle the dataset in different orders.
        MismatchError: The ranks have different datasets.
        UnsupportedTensorError: The elements are not batches.
    """
    if isinstance(dataset, DistributedDataset):
        return dataset
    if dataset.options().experimental_distribute.auto_shard_policy == _OFF:
        return DistributedDataset(dataset)
    check_order(dataset, "the strategy's dataset")
    share = rows_of_batches(dataset, rank, size, "uneven").prefetch(tf.data.AUTOTUNE)
    return DistributedDataset(share, size > 1 and any(seeds_of(dataset)))
