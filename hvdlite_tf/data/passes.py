"""An order for each pass over a dataset, which is the same on all ranks even if a rank has looked at elements alone.

TensorFlow's own shuffle takes a new order whenever a program begins to read. So a rank that looks at one element alone would
have other orders than the other ranks from then on. Here a pass counts only when half of it has been read::

    begin ──▶ seed of (seed, number of passes that count) ──▶ shuffle ──▶ elements ──▶ half of them: announced to all ranks
      └ waits until the pass before counts on all ranks

Half of it, and not all, because a program may not read all: a batch that is not full is dropped, and who knows the number of
batches does not ask for one more. Any number of full batches is more than half. Where the number of elements is not known, a
program has to read until there are no more, and the pass counts at its end.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite import ProcessSet
from hvdlite.api import world
from hvdlite.errors import ArgumentError
from hvdlite.operations import Milestone
from hvdlite.protocols import Array


class Passes:
    """This rank's passes over one dataset.

    Args:
        name: The name of the dataset, the same on all ranks.
        seed: The seed of the orders, the same on all ranks.
        process_set: The ranks that share the dataset; None means all ranks.

    Attributes:
        size: The number of ranks that share the dataset.
    """

    def __init__(self, name: str, seed: int, process_set: ProcessSet | None) -> None:
        self.size = world("shard()").group(process_set).size
        self._name = name
        self._seed = seed
        self._process_set = process_set
        self._counted = 0
        self._told: list[Any] = []  # handles
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    def begin(self) -> Array:
        """Return the seed of the pass that begins now, an int64 scalar.

        The method waits until the pass before counts on all ranks. If this rank alone has read the dataset, the method
        waits for ever, and the watchdog reports it like any other long wait.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            told, self._told, counted = self._told, [], self._counted
        for handle in told:
            handle.wait()
        return np.asarray(np.random.SeedSequence([self._seed, counted]).generate_state(1)[0], np.int64)

    def count(self) -> Array:
        """Tell the other ranks that this pass counts. Return 0, an int64 scalar.

        A thread that fetches elements in advance calls this, so the program's thread may be in `join` (at the end of an epoch),
        and an error here may be seen by nobody. `begin` raises it again.
        """
        with self._lock:
            try:
                engine = world("a shuffled dataset of shard()").engine(self._process_set)
                self._told.append(engine.submit(Milestone(), f"pass {self._counted + 1} over {self._name}"))
            except BaseException as error:
                self._failure = error
                raise
            self._counted += 1
        return np.asarray(0, np.int64)


def shuffled(dataset: tf.data.Dataset, buffer_size: Any, passes: Passes) -> tf.data.Dataset:
    """Return a dataset that has the elements in a new order in each pass.

    Args:
        dataset: The dataset, whose own order is the same on all ranks.
        buffer_size: The number of elements in the shuffle buffer; see `tf.data.Dataset.shuffle`.
        passes: This rank's passes over the dataset.
    """
    once = tf.data.Dataset.from_tensors(np.int64(0))
    elements = once.map(lambda _: _called(passes.begin)).flat_map(lambda seed: _in_order(dataset, buffer_size, seed, 1))
    total = int(dataset.cardinality())
    if total < 0:
        nothing = once.flat_map(lambda _: dataset.take(_called(passes.count)))
        return elements.concatenate(nothing)
    # Of the ranks that share these elements, the first may have read up to size - 1 elements less than the last.
    before = max(0, (total - passes.size) // 2)
    marks = once.repeat(before).concatenate(once.map(lambda _: _called(passes.count)))
    marks = marks.concatenate(once.repeat(max(0, total - before - 1)))
    whole = tf.data.Dataset.zip((elements, marks)).map(lambda element, _: element)
    return whole.apply(tf.data.experimental.assert_cardinality(total))


def _in_order(dataset: Any, buffer_size: Any, seed: Any, seed2: Any) -> Any:
    """Shuffle by these two seeds only. (`Dataset.shuffle` also uses `tf.random.set_seed`'s seed, which may differ by rank.)"""
    variant = tf.raw_ops.ShuffleDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        buffer_size=tf.cast(buffer_size, tf.int64),
        seed=tf.cast(seed, tf.int64),
        seed2=tf.cast(seed2, tf.int64),
        reshuffle_each_iteration=False,
        **dataset._flat_structure,
    )
    return tf.data.experimental.from_variant(variant, dataset.element_spec)


def with_orders_of_passes(dataset: Any, passes_of: Callable[[int], Passes]) -> Any:
    """Return the same pipeline with its shuffles replaced by `shuffled`; the dataset itself if it does not shuffle.

    Args:
        dataset: The dataset, whose shuffles have seeds.
        passes_of: A function that makes the passes of a shuffle from its seed. Every rank calls it equally often.

    Raises:
        ArgumentError: A shuffle is followed by a dataset of a kind that cannot be rebuilt.
    """
    if not _reshuffles(dataset):
        return dataset
    kind = type(dataset).__name__
    if kind not in _BUILT_ANEW:
        raise ArgumentError(
            f"a {kind.lstrip('_')} after a shuffle, before shard(): the ranks would shuffle differently as soon as one of them "
            "looks at an element alone. Let shard() shuffle (shard(dataset, shuffle=buffer_size, seed=1)), and do the rest "
            "after it; or shuffle with reshuffle_each_iteration=False."
        )
    source = with_orders_of_passes(dataset._input_dataset, passes_of)
    return _BUILT_ANEW[kind](source, dataset, passes_of)


def _reshuffles(dataset: Any) -> bool:
    """Return whether a dataset, or a dataset that it reads from, has a new order in each pass."""
    return bool(getattr(dataset, "_reshuffle_each_iteration", False)) or any(map(_reshuffles, dataset._inputs()))


def _shuffled_anew(source: Any, old: Any, passes_of: Callable[[int], Passes]) -> Any:
    if not old._reshuffle_each_iteration:
        return _in_order(source, old._buffer_size, old._seed, old._seed2)
    seeds = int(old._seed), int(old._seed2)
    if not any(seeds):  # only a single rank may shuffle without seeds
        return shuffled(source, old._buffer_size, passes_of(int(np.random.default_rng().integers(2**31))))
    return shuffled(source, old._buffer_size, passes_of(seeds[0] * 1_000_003 + seeds[1]))


_BUILT_ANEW: dict[str, Callable[[Any, Any, Callable[[int], Passes]], Any]] = {
    "_ShuffleDataset": _shuffled_anew,
    "_BatchDataset": lambda source, old, _: source.batch(old._batch_size, old._drop_remainder),
    "_PrefetchDataset": lambda source, old, _: source.prefetch(int(old._buffer_size)),
    "_RepeatDataset": lambda source, old, _: source.repeat(old._count),
    "_TakeDataset": lambda source, old, _: source.take(old._count),
    "_SkipDataset": lambda source, old, _: source.skip(old._count),
    "_OptionsDataset": lambda source, old, _: source.with_options(old.options()),
    "_MapDataset": lambda source, old, _: source.map(old._map_func._func),
    "_ParallelMapDataset": lambda source, old, _: source.map(old._map_func._func, old._num_parallel_calls),
}
"""Functions that rebuild a dataset on another source, by the name of the dataset's class."""


def _called(function: Callable[[], Array]) -> tf.Tensor:
    """Return a tensor of the function's result, an int64 scalar. The function runs in the world of the code that calls this."""
    context = contextvars.copy_context()  # TensorFlow's threads do not have the context of the program's thread
    value = tf.numpy_function(lambda: context.copy().run(function), [], tf.int64)
    value.set_shape(())
    return value
