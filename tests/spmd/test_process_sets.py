"""Subsets of the ranks with operations of their own."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.api import world
from hvdlite.errors import ArgumentError, MismatchError
from hvdlite.protocols import TensorInfo


@pytest.mark.ranks(at_least=2)
def test_overlapping_sets_at_the_same_time(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        # Every pair of neighbours, in a ring: each rank is in two of them (three ranks), or in the one pair (two).
        pairs = [
            hvd.add_process_set(pair)
            for pair in sorted({tuple(sorted((r, (r + 1) % size))) for r in range(size)})
            if len(pair) < size
        ]
        alone = hvd.add_process_set([size - 1])
        mine = [pair for pair in pairs if pair.included()]
        order = mine if rank % 2 else mine[::-1]  # ranks need not agree on the order of different sets
        handles = {pair: hvd.allreduce_async(np.array([float(rank)]), hvd.Sum, process_set=pair) for pair in order}
        everybody = hvd.allreduce_async(np.array([1.0]), hvd.Sum)
        if alone.included():
            assert hvd.allreduce(np.array([5.0]), process_set=alone) == 5.0
        for pair, handle in handles.items():
            assert handle.wait() == sum(pair.ranks)
        assert everybody.wait() == size
        for process_set in [*pairs, alone]:
            assert hvd.remove_process_set(process_set)
            assert not hvd.remove_process_set(process_set)

    ranks(check)


def test_a_set_numbers_its_ranks(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        assert (hvd.global_process_set.size(), hvd.global_process_set.rank()) == (size, rank)
        assert hvd.global_process_set.included()
        assert hvd.allreduce(np.ones(1), hvd.Sum, process_set=hvd.global_process_set) == size
        if size < 3:
            return
        upper = hvd.ProcessSet([size - 1, 1])
        assert (upper.size(), upper.rank(), upper.included(), upper.process_set_id) == (None, None, None, None)
        hvd.add_process_set(upper)
        assert upper.ranks == [1, size - 1]
        assert upper.size() == 2
        assert upper.included() == (rank in (1, size - 1))
        assert upper.rank() == {1: 0, size - 1: 1}.get(rank)
        if upper.included():
            assert (
                hvd.broadcast(np.array([rank]), 1, process_set=upper) == size - 1
            )  # the root is a number within the set
            assert hvd.allgather(np.array([rank]), process_set=upper).tolist() == [1, size - 1]
            hvd.barrier(process_set=upper)
        else:
            with pytest.raises(ArgumentError, match=f"rank {rank} is not in"):
                hvd.barrier(process_set=upper)
        hvd.barrier()
        hvd.remove_process_set(upper)
        with pytest.raises(ArgumentError, match="not in effect"):
            hvd.barrier(process_set=upper)

    ranks(check)


def test_bad_sets(ranks: Any) -> None:
    def check() -> None:
        size = hvd.size()
        for bad, text in (
            ([0, 0], "more than once"),
            ([], "at least one"),
            ([0, size], f"rank {size} does not exist"),
            ([-1], "not a rank"),
            (["a"], "not a rank"),
            (range(size), "in effect already"),
        ):
            with pytest.raises(ArgumentError, match=text):
                hvd.add_process_set(bad)
        with pytest.raises(ArgumentError, match="not in effect"):
            hvd.allreduce(np.ones(1), process_set=hvd.ProcessSet([0]))
        if size > 1:
            with pytest.raises(MismatchError, match=r"add_process_set\(ranks=\(0,\)\)"):
                hvd.add_process_set([min(hvd.rank(), 1)])
            handle_of = hvd.add_process_set([0])
            if hvd.rank() == 0:
                handle = hvd.barrier_async(process_set=handle_of)
                handle.wait()
            hvd.remove_process_set(handle_of)
        assert hvd.allreduce(np.ones(1), hvd.Sum) == size

    ranks(check)


def test_groups_of_equal_ranks_exist_side_by_side(ranks: Any) -> None:
    """Operations of equal names, gradients and memory of each group are its own, whatever the order."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        some = range(max(1, size - 1))
        first, second, everybody = hvd.new_group(some), hvd.new_group(hvd.ProcessSet(some)), hvd.new_group(range(size))
        assert len({first.process_set_id, second.process_set_id, everybody.process_set_id, 0}) == 4
        assert first.ranks == second.ranks == list(some)
        factors = {first: 1.0, second: 10.0, everybody: 100.0, None: 1000.0}
        mine = list(factors) if rank < len(some) else [everybody, None]
        for order in (mine, mine[::-1], mine[::-1] if rank % 2 else mine):
            values = {each: np.full(3, factors[each] * (rank + 1)) for each in order}
            handles = {each: hvd.allreduce_async(values[each], hvd.Sum, "x", process_set=each) for each in order}
            for each in mine:
                n = len(some) if each in (first, second) else size
                np.testing.assert_array_equal(handles[each].wait(), factors[each] * n * (n + 1) / 2)
        if rank < len(some):
            infos = [TensorInfo("float32", (5,))]
            reducers = [world().group(each).reducers.make(infos, hvd.Sum) for each in (first, second)]
            for scale, reducer in enumerate(reducers, 1):
                reducer.memory_of(0)[:] = scale * (rank + 1)
            for scale, reducer in [*enumerate(reducers, 1)][::-1]:
                reducer.exchange([True])
                np.testing.assert_array_equal(reducer.result_of(0), scale * sum(r + 1 for r in some))
        assert hvd.remove_process_set(first)
        if rank < len(some):
            assert hvd.allreduce(np.ones(1), hvd.Sum, "x", process_set=second) == len(some)
            with pytest.raises(ArgumentError, match="not in effect"):
                hvd.allreduce(np.ones(1), process_set=first)
        assert hvd.remove_process_set(second)
        assert hvd.remove_process_set(everybody)
        assert hvd.allreduce(np.ones(1), hvd.Sum) == size

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_a_group_beside_a_process_set(ranks: Any) -> None:
    """Only `add_process_set` refuses equal ranks, as Horovod's does; and it minds only what it has added."""

    def check() -> None:
        last = [hvd.size() - 1]
        mine = hvd.new_group(last)
        added = hvd.add_process_set(last)
        another = hvd.new_group(last)
        for taken in (last, mine, another):
            with pytest.raises(ArgumentError, match=r"in effect already.*new_group"):
                hvd.add_process_set(taken)
        for each in (added, mine, another):
            assert each.size() == 1
            if each.included():
                assert hvd.allreduce(np.full(1, 3.0), hvd.Sum, process_set=each) == 3.0
            assert hvd.remove_process_set(each)
        assert hvd.remove_process_set(hvd.add_process_set(mine))
        for bad, error in (([], "at least one"), ([0, 0], "more than once"), ([hvd.size()], "does not exist")):
            with pytest.raises(ArgumentError, match=error):
                hvd.new_group(bad)
        with pytest.raises(MismatchError, match=r"new_group\(ranks=\(0,\)\)"):
            hvd.new_group([min(hvd.rank(), 1)])

    ranks(check)


@pytest.mark.parametrize("joins", [False, True])
def test_join_concerns_one_of_two_groups_of_equal_ranks(ranks: Any, joins: bool) -> None:
    """A rank that has joined one group goes on in the other."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        first, second = hvd.new_group(range(size)), hvd.new_group(range(size))
        if rank == size - 1 or joins:
            # Another thread joins, so that this one can go on in the other group.
            thread = threading.Thread(target=contextvars.copy_context().run, args=(hvd.join, first))
            thread.start()
            assert hvd.allreduce(np.ones(1), hvd.Sum, "x", process_set=second) == size
        else:
            assert hvd.allreduce(np.ones(1), hvd.Sum, "x", process_set=first) == size - 1
            assert hvd.allreduce(np.ones(1), hvd.Sum, "x", process_set=second) == size
            hvd.join(first)
        if rank == size - 1 or joins:
            thread.join()
        assert hvd.remove_process_set(first)
        assert hvd.remove_process_set(second)

    ranks(check)
