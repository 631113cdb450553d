"""Subsets of the ranks with operations of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.errors import ArgumentError, MismatchError


def test_overlapping_sets_at_the_same_time(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        if size < 2:
            return
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
