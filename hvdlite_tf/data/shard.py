"""A `tf.data.Dataset` dealt out to the ranks: `shard`."""

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
    """This rank's share of a dataset that every rank has. Every rank calls this, with datasets that give the same elements.

    Each rank reads the whole dataset and keeps its share, so shard early: before what is expensive, such as decoding images,
    and before it is batched::

        train = hvd.shard(tf.data.Dataset.from_tensor_slices((x, y)), shuffle=10_000).batch(64)  # of each rank
        train = hvd.shard(tf.data.Dataset.from_tensor_slices((x, y)).batch(128), by="batches")   # of all ranks together

    What shuffles after `shard` may shuffle differently on each rank; what shuffles before must not, and is checked. A rank may
    look at some elements alone: the order changes when a pass has been read to its end, on all ranks.

    Args:
        dataset: Of single examples, or of batches of all ranks together.
        by: "examples": rank r of n takes elements r, r + n, r + 2n, …; the dataset must say how many it has. "batches": its
            part of the rows of each batch, the first part on rank 0; that keeps the batches those of one process.
        remainder: What happens if they do not come out even. "repeat": every rank gets the same number of elements (or rows of
            each batch), and a few, fewer than there are ranks, come a second time. "drop": the same number, and as few are
            left out. "uneven": each exactly once, so that some ranks have one more, and maybe one step more: then let the
            ranks end together (`hvd.callbacks.Distributed`, `hvd.join`). A rank's part of a small batch may then be empty.
        shuffle: Shuffle first, in a buffer of this many elements, in an order that is the same on all ranks and another one in
            each epoch.
        seed: For `shuffle`; that of rank 0 counts, which draws one if it has none.
        process_set: The ranks that share the dataset; all by default.

    Returns:
        The share, on which a `hvd.Strategy` leaves every rank its own
        (``options().experimental_distribute.auto_shard_policy`` is OFF).

    Raises:
        ArgumentError: An argument is not one of those; or, by examples, the dataset cannot say how many it has; or the ranks
            shuffle it differently; or something comes between its own shuffle and `shard` that hides the shuffle from `shard`.
        MismatchError: The ranks passed different datasets. Raised on all of them.
        UnsupportedTensorError: By batches, an element has no rows.
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
    dataset = with_orders_of_passes(dataset, passes_of)  # for one rank too: the order is that of any number of ranks
    if by == "examples":
        dataset = with_equal_shares(dataset, engine.size, remainder, shuffles)
    if shuffle:
        drawn = int(np.random.default_rng().integers(2**31)) if seed is None else seed
        dataset = shuffled(dataset, shuffle, passes_of(drawn))
    if by == "examples":
        share = dataset.shard(engine.size, engine.rank)
    else:
        share = rows_of_batches(dataset, engine.rank, engine.size, remainder)
    if shuffle or shuffles:
        share = share.prefetch(1)  # so that the end of a pass is noticed with its last element
    return as_it_is(share)


def with_equal_shares(
    dataset: tf.data.Dataset, size: int, remainder: Remainder, shuffles: bool = False
) -> tf.data.Dataset:
    """As many elements as `size` ranks share evenly, if `remainder` wants that, of one that shuffles or not; see `shard`."""
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
        # What comes again is read in a second pass, which not every rank begins: orders would differ from then on.
        raise ArgumentError(
            f"{total} shuffled elements cannot be dealt out evenly to {size} ranks: let shard() shuffle them "
            '(shard(dataset, shuffle=buffer_size)), or shuffle what it returns, or pass remainder="drop".'
        )
    return dataset.repeat().take(-(-total // size) * size)


def rows_of_batches(dataset: tf.data.Dataset, rank: int, size: int, remainder: Remainder) -> tf.data.Dataset:
    """This rank's part of the rows of each batch; see `shard`."""
    if size == 1:
        return dataset
    if remainder == "drop":
        dataset = dataset.filter(lambda *element: _rows_of(element) >= size)

    def part_of(*element: Any) -> Any:
        part = part_of_batch(element, rank, size, remainder)
        return part if isinstance(dataset.element_spec, tuple) else part[0]

    return dataset.map(part_of, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def part_of_batch(batch: Any, rank: int, size: int, remainder: Remainder = "uneven") -> Any:
    """The rows of a batch that are a rank's: neighbours, those of rank 0 first.

    Args:
        batch: Tensors, dense, ragged or sparse, in any structure, of equally many rows. Scalars are for all ranks.
        rank, size: Of which rank, of how many.
        remainder: As for `shard`.

    Returns:
        The same structure. Static shapes are kept where they are known.
    """
    known = _known_rows(batch)
    rows = _rows_of(batch) if known is None else known
    begin, end = (_bounds(rows, number, size, remainder) for number in (rank, rank + 1))
    if remainder == "repeat":  # the last rows of the others again, where there are not enough
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
    """The same dataset, which nobody shards once more."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


def _bounds(rows: Any, number: int, size: int, remainder: Remainder) -> Any:
    """Where the part of rank `number` begins. The first ranks have the rows that are left over."""
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
    """The number of rows of a batch if its static shape tells."""
    shape = _with_rows(batch)[0].shape
    return None if shape.rank is None else shape[0]


def _rows_of(batch: Any) -> Any:
    """The number of rows of a batch, an int32 tensor."""
    leaf = _with_rows(batch)[0]
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf)[0]
