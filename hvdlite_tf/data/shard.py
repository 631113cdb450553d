"""`shard`: gives each rank a part of a `tf.data.Dataset`."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import numpy as np
import tensorflow as tf

import hvdlite
from hvdlite import ProcessSet
from hvdlite.api import world
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite_tf.data.passes import Passes, shuffled, with_orders_of_passes
from hvdlite_tf.data.shuffle_check import check_order, seeds_of

By = Literal["examples", "batches"]
Remainder = Literal["repeat", "drop", "uneven"]

_numbers = itertools.count(1)


def shard(
    dataset: tf.data.Dataset,
    by: By = "examples",
    remainder: Remainder = "repeat",
    *,
    shuffle: int = 0,
    seed: int | None = None,
    process_set: ProcessSet | None = None,
) -> tf.data.Dataset:
    """Return this rank's share of a dataset. Every rank calls this function, with datasets of the same elements.

    Each rank reads the whole dataset and keeps its share. So shard early: before expensive work, such as decoding images, and
    before batching::

        train = hvd.shard(tf.data.Dataset.from_tensor_slices((x, y)), shuffle=10_000).batch(64)  # 64 on each rank
        train = hvd.shard(tf.data.Dataset.from_tensor_slices((x, y)).batch(128), by="batches")   # 128 on all ranks together

    A shuffle after `shard` may differ between the ranks. A shuffle before `shard` must be the same on all ranks, which `shard`
    checks. A rank may look at some elements alone, because the order changes only when more than half of a pass has been read;
    what TensorFlow prefetches has been read too.
    All ranks read a shuffled dataset equally often: a rank that begins its next pass waits until the others have read half of
    the pass before, and joining (`hvd.join`) does not count as reading.

    Args:
        dataset: A dataset of single examples, or of global batches.
        by: "examples" means that rank r of n takes the elements r, r + n, r + 2n, …; the number of elements must be known.
            "batches" means that each rank takes its part of the rows of each batch, and rank 0 the first part, so that the
            batches remain those of one process.
        remainder: What happens if the number of elements (or rows of a batch) is not a multiple of the number of ranks.
            "repeat": every rank gets equally many, and a few, fewer than there are ranks, are used twice. "drop": every rank
            gets equally many, and a few are left out. "uneven": each is used once, so some ranks have one more, and perhaps one
            step more; then let the ranks end together (`hvd.callbacks.Distributed`, `hvd.join`). A rank's part of a small batch
            may be empty then.
        shuffle: The number of elements in a buffer in which the dataset is shuffled before it is sharded; 0 means no shuffle.
            The order is the same on all ranks, and a new one in each epoch.
        seed: The seed for `shuffle`. Rank 0's counts; None means that rank 0 draws one.
        process_set: The ranks that share the dataset; None means all ranks.

    Returns:
        The share. Its ``options().experimental_distribute.auto_shard_policy`` is OFF, so `hvd.Strategy` does not divide it.

    Raises:
        ArgumentError: `by` or `remainder` is unknown; or the number of examples is not known; or the ranks shuffle the dataset
            in different orders; or a step between the dataset's own shuffle and `shard` hides the shuffle from `shard`.
        MismatchError: The ranks passed different datasets. All ranks raise it.
        UnsupportedTensorError: An element of a dataset of batches has no rows.

    Examples:
        >>> on_ranks(2, lambda: [int(each) for each in hvd.shard(tf.data.Dataset.range(6))])
        [[0, 2, 4], [1, 3, 5]]
        >>> on_ranks(2, lambda: [each.numpy().tolist() for each in hvd.shard(tf.data.Dataset.range(6).batch(4), by="batches")])
        [[[0, 1], [4]], [[2, 3], [5]]]
    """
    here = world("shard()")
    if not isinstance(dataset, tf.data.Dataset):
        raise ArgumentError(f"shard() expects a tf.data.Dataset; got {type(dataset).__name__}.")
    if by not in ("examples", "batches"):
        raise ArgumentError(f'by={by!r}: expected "examples" or "batches".')
    if remainder not in ("repeat", "drop", "uneven"):
        raise ArgumentError(f'remainder={remainder!r}: expected "repeat", "drop" or "uneven".')
    check_order(dataset, "shard()", process_set)
    engine = here.engine(process_set)
    number = itertools.count(1)

    def passes_of(own_seed: int) -> Passes:
        name = f"shard() {hvdlite.broadcast_object(next(_numbers), process_set=process_set)}, shuffle {next(number)}"
        return Passes(name, hvdlite.broadcast_object(own_seed, process_set=process_set) % 2**63, process_set)

    shuffles = any(seeds_of(dataset))
    dataset = with_orders_of_passes(dataset, passes_of)  # for one rank too: its order equals that of several
    if by == "examples":
        dataset = with_equal_shares(dataset, engine.size, remainder, shuffles)
    if shuffle:
        drawn = int(np.random.default_rng().integers(2**31)) if seed is None else seed
        dataset = shuffled(dataset, shuffle, passes_of(drawn))
    if by == "examples":
        share = dataset.shard(engine.size, engine.rank)
    else:
        share = rows_of_batches(dataset, engine.rank, engine.size, remainder)
    return as_it_is(share)


def with_equal_shares(
    dataset: tf.data.Dataset, size: int, remainder: Remainder, shuffles: bool = False
) -> tf.data.Dataset:
    """Return a dataset whose number of elements is a multiple of `size`, unless `remainder` is "uneven". See `shard`.

    Raises:
        ArgumentError: The number of elements is not known, or the dataset shuffles (`shuffles`) and would be read twice.
    """
    total = int(dataset.cardinality())
    if remainder == "uneven" or total == tf.data.INFINITE_CARDINALITY:
        return dataset
    if total == tf.data.UNKNOWN_CARDINALITY:
        raise ArgumentError(
            "shard() cannot know how many elements this dataset has, so the ranks might make different numbers of steps: say "
            'it (dataset.apply(tf.data.experimental.assert_cardinality(n))), or shard batches (by="batches"), or let the ranks '
            'end together (remainder="uneven").'
        )
    if total % size == 0:
        return dataset
    if remainder == "drop":
        return dataset.take(total // size * size)
    if shuffles:
        # The repeated elements are read in a second pass, which not every rank begins: the orders would differ from then on.
        raise ArgumentError(
            f"{total} shuffled elements cannot be dealt out evenly to {size} ranks: let shard() shuffle them "
            '(shard(dataset, shuffle=buffer_size)), or shuffle what it returns, or pass remainder="drop".'
        )
    return dataset.repeat().take(-(-total // size) * size)


def rows_of_batches(dataset: tf.data.Dataset, rank: int, size: int, remainder: Remainder) -> tf.data.Dataset:
    """Return a dataset of this rank's part of the rows of each batch. See `shard`."""
    if size == 1:
        return dataset
    if remainder == "drop":
        dataset = dataset.filter(lambda *element: _rows_of(element) >= size)

    def part_of(*element: Any) -> Any:
        part = part_of_batch(element, rank, size, remainder)
        return part if isinstance(dataset.element_spec, tuple) else part[0]

    # One element at a time: parallel calls read ahead, which a rank that looks at one element alone would do alone.
    return dataset.map(part_of)


def part_of_batch(batch: Any, rank: int, size: int, remainder: Remainder = "uneven") -> Any:
    """Return a rank's part of the rows of a batch: consecutive rows, of which rank 0 has the first.

    Args:
        batch: Dense, ragged or sparse tensors in any structure, with equal numbers of rows. Every rank gets all scalars.
        rank: The rank.
        size: The number of ranks.
        remainder: See `shard`.

    Returns:
        The same structure. Static shapes are kept if they are known.
    """
    known = _known_rows(batch)
    rows = _rows_of(batch) if known is None else known
    begin, end = (_bounds(rows, number, size, remainder) for number in (rank, rank + 1))
    if remainder == "repeat":  # a rank with too few rows also takes a row of a neighbour
        longest = -(-rows // size)
        begin = (tf.minimum if known is None else min)(begin, rows - longest)
        end = begin + longest

    def part(leaf: Any) -> Any:
        if leaf is None or leaf.shape.rank == 0:
            return leaf
        if isinstance(leaf, tf.SparseTensor):
            others = leaf.dense_shape[1:]
            first, count = (tf.cast(each, tf.int64)[None] for each in (begin, end - begin))
            return tf.sparse.slice(leaf, tf.concat([first, tf.zeros_like(others)], 0), tf.concat([count, others], 0))
        return leaf[begin:end]

    return tf.nest.map_structure(part, batch)


def as_it_is(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return the same dataset, with the option that keeps strategies from sharding it once more."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


def _bounds(rows: Any, number: int, size: int, remainder: Remainder) -> Any:
    """Return the first row of the part of rank `number`. The first ranks get the rows that remain."""
    even = rows // size * number
    if remainder == "drop":
        return even
    spare = rows % size
    return even + (min(number, spare) if isinstance(spare, int) else tf.minimum(number, spare))


def _with_rows(batch: Any) -> list[Any]:
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None and leaf.shape.rank != 0]
    if not leaves:
        raise UnsupportedTensorError(
            "expected batches, whose tensors have a dimension of rows; got scalars. Call dataset.batch(…) first, or shard by "
            "examples."
        )
    return leaves


def _known_rows(batch: Any) -> int | None:
    """Return the number of rows of a batch if its static shape has it; otherwise None."""
    shape = _with_rows(batch)[0].shape
    return None if shape.rank is None else shape[0]


def _rows_of(batch: Any) -> Any:
    """Return the number of rows of a batch as an int32 tensor."""
    leaf = _with_rows(batch)[0]
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf)[0]
