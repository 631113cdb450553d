"""`hvd.shard`: shares that are disjoint and complete, and steps that are equal on all ranks."""

from __future__ import annotations

import contextvars
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import hvdlite_tf as hvd
from hvdlite.api import world
from hvdlite.errors import ArgumentError, MismatchError, NotInitializedError, UnsupportedTensorError
from hvdlite_tf.data.shard import part_of_batch
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    tf.config.threading.set_inter_op_parallelism_threads(8)

FEW = settings(max_examples=6)  # each runs pipelines of TensorFlow
TOTALS = st.integers(0, 14)


def rows_of(dataset: Any) -> list[int]:
    return [int(row) for element in dataset.as_numpy_iterator() for row in np.ravel(element)]


def all_shares(dataset: Any) -> list[list[int]]:
    shares: list[list[int]] = hvd.allgather_object(rows_of(dataset))
    return shares


@FEW
@given(total=TOTALS, batch=st.integers(1, 6), by=st.sampled_from(["examples", "batches"]))
def check_shares(total: int, batch: int, by: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    dataset = tf.data.Dataset.range(total)
    whole = Counter(range(total))
    batches = 1
    if by == "batches":
        dataset, batches = dataset.batch(batch), -(-total // batch)

    exactly = all_shares(hvd.shard(dataset, by, "uneven"))
    assert sum(map(Counter, exactly), Counter()) == whole
    assert max(map(len, exactly)) - min(map(len, exactly)) <= batches

    repeated = all_shares(hvd.shard(dataset, by, "repeat"))
    assert len(set(map(len, repeated))) == 1
    seen = sum(map(Counter, repeated), Counter())
    assert seen.keys() == whole.keys()
    assert seen.total() - total < size * max(batches, 1)

    dropped = all_shares(hvd.shard(dataset, by, "drop"))
    assert len(set(map(len, dropped))) == 1
    seen = sum(map(Counter, dropped), Counter())
    assert seen <= whole
    assert total - seen.total() < size * max(batches, 1)

    # The same steps on all ranks, as one process would make them.
    if by == "batches":
        steps = [np.asarray(element).tolist() for element in hvd.shard(dataset, by, "uneven").as_numpy_iterator()]
        for step, parts in enumerate(zip(*hvd.allgather_object(steps), strict=True)):
            joined = [row for part in parts for row in part]
            assert joined == list(range(step * batch, min(total, step * batch + batch)))
    else:
        assert exactly[rank] == list(range(rank, total, size))


def test_shares(ranks: Any) -> None:
    ranks(check_shares)


def test_shuffled_together(ranks: Any) -> None:
    """In another order in each epoch, all ranks in the same."""

    def check() -> None:
        size = hvd.size()
        for seed in (None, 5):
            dataset = hvd.shard(tf.data.Dataset.range(50), shuffle=50, seed=seed)
            epochs = [hvd.allgather_object(rows_of(dataset)) for _ in range(3)]
            for shares in epochs:
                seen = sum(map(Counter, shares), Counter())
                assert seen.keys() == set(range(50))
                assert seen.total() == -(-50 // size) * size
            assert len({tuple(shares[0]) for shares in epochs}) == 3
        before = tf.data.Dataset.range(51).shuffle(51, seed=1)
        if 51 % size:
            with pytest.raises(ArgumentError, match=r"let shard\(\) shuffle"):
                hvd.shard(before)
        for _ in range(2):
            shares = all_shares(hvd.shard(before, remainder="drop"))
            assert max(sum(map(Counter, shares), Counter()).values()) == 1

    ranks(check)


def test_what_a_rank_looks_at_alone_changes_nothing(ranks: Any) -> None:
    """Each row comes once in each pass, though ranks have looked at elements, before `shard` and after it."""

    rows = 192  # TensorFlow prefetches: who looks at one batch of 6 makes it read four or five on a busy machine

    def numbers(**shuffle: Any) -> Any:
        return tf.data.Dataset.range(rows).shuffle(rows, **shuffle)

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        pipelines: dict[str, tuple[Any, Any]] = {
            "by shard": (tf.data.Dataset.range(rows), lambda dataset: hvd.shard(dataset, shuffle=rows)),
            "before shard": (numbers(seed=1), hvd.shard),
            "batches": (
                numbers(seed=1).map(lambda x: x + 0).batch(6).prefetch(1),
                lambda dataset: hvd.shard(dataset, "batches"),
            ),
            "once": (numbers(seed=1, reshuffle_each_iteration=False).skip(0), hvd.shard),
        }
        for name, (dataset, share_of) in pipelines.items():
            if rank == 0:
                next(iter(dataset))
            share = share_of(dataset)
            orders = []
            for epoch in range(3):
                if rank == epoch % size:
                    next(iter(share))
                shares = all_shares(share)
                assert sorted(row for each in shares for row in each) == list(range(rows)), name
                orders.append(shares[0])
            assert (orders[0] == orders[1]) == (name == "once"), name
            repeated = rows_of(share.repeat().take(rows * 3 // 2 // (6 if name == "batches" else size)))
            assert len(repeated) == rows * 3 // 2 // size, name

    ranks(check)


@pytest.mark.slow
def test_a_pass_whose_last_rows_are_dropped_counts(ranks: Any) -> None:
    """The program knows the number of batches and does not ask for one more, so it never reads the rows that remain."""

    def check() -> None:
        size = hvd.size()
        for rows, batch in ((60, 7), (9, 2), (20, 6), (1437, 64)):
            before = tf.data.Dataset.range(rows)
            for share in (
                hvd.shard(before, shuffle=rows, seed=1).batch(max(1, batch // size), drop_remainder=True),
                hvd.shard(
                    before.shuffle(rows, seed=1).batch(batch, drop_remainder=True), by="batches", remainder="uneven"
                ),
            ):
                passes = []
                for _ in range(3):
                    some = iter(share)
                    read = [row for _ in range(int(share.cardinality())) for row in next(some).numpy().tolist()]
                    del some
                    passes.append([row for part in hvd.allgather_object(read) for row in part])
                assert all(len(set(each)) == len(each) or rows % size for each in passes)
                assert len({tuple(each) for each in passes}) == 3, (rows, batch)

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_a_pass_counts_though_its_rank_has_joined(ranks: Any) -> None:
    """Elements are fetched in advance by another thread, which runs on while the program's thread has joined."""

    def check() -> None:
        share = hvd.shard(tf.data.Dataset.range(48), shuffle=48, seed=1)
        engine = world("this test").engine()
        context = contextvars.copy_context()
        failed: list[BaseException] = []

        def read_after_joining() -> None:
            try:
                while not engine.has_joined:
                    time.sleep(0)
                rows_of(share)
            except BaseException as error:
                failed.append(error)

        fetcher = threading.Thread(target=context.run, args=(read_after_joining,))
        if hvd.rank():
            fetcher.start()
        else:
            rows_of(share)
            next(iter(share))  # waits until all ranks have read the first pass, and all others have joined
        hvd.join()
        if hvd.rank():
            fetcher.join()
        assert not failed
        for _ in range(2):
            assert sorted(row for each in all_shares(share) for row in each) == list(range(48))

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_what_ranks_read_in_other_orders_is_refused(ranks: Any) -> None:
    tf.random.set_seed(None)  # a Strategy() of another test's has set one

    def check() -> None:
        numbers = tf.data.Dataset.range(24)
        loose = tf.data.Options()
        loose.deterministic = False

        def sorted_by_chance(rows: Any) -> Any:
            return tf.gather(rows, tf.argsort(tf.random.uniform([8])))

        inner = tf.data.Dataset.range(3)
        for dataset, text in {
            inner.interleave(lambda i: numbers.shuffle(24)): "in different orders",
            inner.flat_map(lambda i: numbers.shuffle(24, seed=hvd.rank())): "in different orders",
            numbers.batch(8).map(tf.random.shuffle).unbatch(): "in different orders",
            numbers.batch(8).map(sorted_by_chance).unbatch(): "in different orders",
            numbers.filter(lambda x: tf.random.uniform([]) < 0.5): "in different orders",
            numbers.map(
                lambda x: x, num_parallel_calls=2, deterministic=False
            ): "ParallelMapDataset with deterministic=False",
            numbers.with_options(loose).batch(2): "options.*deterministic=False",
            inner.flat_map(
                lambda i: numbers.map(lambda x: x, 2, deterministic=False)
            ): "FlatMapDataset with deterministic",
            numbers.shuffle(24, seed=1).window(2): "Window.*after a shuffle",
        }.items():
            with pytest.raises(ArgumentError, match=text):
                hvd.shard(dataset, remainder="uneven")
        # What only changes values is each rank's own affair.
        flipped = numbers.map(lambda x: (x, tf.random.uniform([])))
        assert len(list(hvd.shard(flipped))) == 24 // hvd.size()

    ranks(check)


@pytest.mark.ranks(at_least=3)
def test_a_process_set_shares(ranks: Any) -> None:
    def check() -> None:
        size = hvd.size()
        pair = hvd.add_process_set([0, size - 1])
        if pair.included():
            share = hvd.shard(tf.data.Dataset.range(6), process_set=pair)
            assert rows_of(share) == ([0, 2, 4] if hvd.rank() == 0 else [1, 3, 5])
        hvd.barrier()
        hvd.remove_process_set(pair)

    ranks(check)


def test_bad_use(ranks: Any) -> None:
    if not UNDER_MPI:
        with pytest.raises(NotInitializedError, match="shard"):
            hvd.shard(tf.data.Dataset.range(3))

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        numbers = tf.data.Dataset.range(8)
        with pytest.raises(ArgumentError, match="expected a tf.data.Dataset|expects a tf.data.Dataset; got list"):
            hvd.shard([1, 2])
        with pytest.raises(ArgumentError, match="by='rows'"):
            hvd.shard(numbers, by="rows")  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="remainder='keep'"):
            hvd.shard(numbers, remainder="keep")  # type: ignore[arg-type]
        unknown = numbers.filter(lambda x: x > 2)
        with pytest.raises(ArgumentError, match="cannot know how many"):
            hvd.shard(unknown)
        assert sorted(sum(map(Counter, all_shares(hvd.shard(unknown, remainder="uneven"))), Counter())) == [
            3,
            4,
            5,
            6,
            7,
        ]
        endless = hvd.shard(numbers.repeat())
        assert rows_of(endless.take(2)) == [rank % 8, (rank + size) % 8]
        if size == 1:
            return
        with pytest.raises(UnsupportedTensorError, match="got scalars"):
            hvd.shard(numbers, by="batches")
        with pytest.raises(MismatchError, match="different numbers of elements"):
            hvd.shard(tf.data.Dataset.range(8 + rank))
        with pytest.raises(ArgumentError, match="in different orders"):
            hvd.shard(numbers.shuffle(8, seed=rank + 1))

    ranks(check)


@pytest.mark.skipif(UNDER_MPI, reason="nothing of it is about ranks")
@given(rows=st.integers(1, 9), size=st.integers(1, 4))
@settings(max_examples=15)
def test_parts_of_batches_of_all_kinds(rows: int, size: int) -> None:
    """Dense, ragged and sparse tensors and None in one structure; static shapes where they are known."""
    table = np.arange(rows * 2).reshape(rows, 2) + 1
    batch = {
        "dense": tf.constant(table),
        "ragged": tf.RaggedTensor.from_row_lengths(np.arange(rows * (rows + 1) // 2), np.arange(rows) + 1),
        "sparse": tf.sparse.from_dense(table),
        "nothing": None,
        "scalar": tf.constant(7),
    }
    parts = [part_of_batch(batch, rank, size) for rank in range(size)]
    assert np.array_equal(np.concatenate([part["dense"] for part in parts]), table)
    assert tf.concat([part["ragged"] for part in parts], 0).to_list() == batch["ragged"].to_list()
    assert np.array_equal(np.concatenate([tf.sparse.to_dense(part["sparse"]) for part in parts]), table)
    assert all(part["nothing"] is None and part["scalar"] == 7 for part in parts)

    spec = tf.data.Dataset.from_tensors(batch["dense"]).map(lambda x: part_of_batch(x, size - 1, size)).element_spec
    assert spec.shape == (rows // size, 2)
