"""Jobs on some of the processes that mpirun started. The argument names the case."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable

import numpy as np
import pytest
from mpi4py import MPI

import hvdlite as hvd
from hvdlite.errors import ArgumentError

everybody = MPI.COMM_WORLD
own, size = everybody.Get_rank(), everybody.Get_size()


def total(process_set: hvd.ProcessSet = hvd.global_process_set) -> int:
    """Return the sum of the MPI ranks of the processes in a process set."""
    return int(hvd.allreduce(np.array([own]), hvd.Sum, process_set=process_set)[0])


def ranks() -> None:
    """Start a job of the first and the last process, in any order; then a job of all; then two jobs at once."""
    if own in (0, size - 1):
        hvd.init([size - 1, 0] if own else (0, size - 1))
        assert (hvd.size(), hvd.rank(), hvd.local_size()) == (2, int(own > 0), 2)
        assert total() == size - 1
        hvd.shutdown()
    hvd.init(process_sets="dynamic")
    assert (hvd.size(), hvd.rank()) == (size, own)
    hvd.shutdown()
    hvd.init(comm=[1] if own == 1 else np.array([r for r in range(size) if r != 1]))
    assert total() == (1 if own == 1 else sum(range(size)) - 1)


def communicator() -> None:
    """Start a job for each part of a split communicator, at the same time. The user's communicator still works."""
    part = everybody.Split(own % 2, -own)  # ranks in the opposite order
    hvd.init(part)
    assert (hvd.size(), hvd.rank()) == (part.Get_size(), part.Get_rank())
    assert total() == sum(r for r in range(size) if r % 2 == own % 2)
    assert part.allreduce(1) == hvd.size()
    # A process set has the ranks of the job, also if the set is given as a communicator.
    if hvd.size() == 2:
        alone = hvd.add_process_set(part.Split(hvd.rank()))
        assert alone.ranks == [hvd.rank()] and total(alone) == own


def process_sets() -> None:
    """Make a process set of each part of a split communicator. Each rank passes its own part."""
    part = everybody.Split(own % 2, own)
    mine = hvd.ProcessSet(part)
    assert mine.ranks == [] and mine.included() is None
    hvd.init(process_sets=[mine])
    assert mine.ranks == [r for r in range(size) if r % 2 == own % 2]
    assert mine.included() and mine.rank() == own // 2
    assert total(mine) == sum(mine.ranks)
    # Some ranks have no communicator.
    some = everybody.Split(0 if own in (0, 1) else MPI.UNDEFINED, own)
    pair = hvd.add_process_set(some)
    assert pair.ranks == [0, 1] and pair.included() == (own < 2)
    if own < 2:
        assert total(pair) == 1
    assert hvd.remove_process_set(pair)
    refused(lambda: hvd.add_process_set(MPI.COMM_NULL), "every rank passed")
    assert total() == sum(range(size))


def equal_sets() -> None:
    """init() refuses sets of equal ranks on every rank, and starts no job. Then it accepts sets of different ranks."""
    for bad in ([[0, 1], [1, 0]], [range(size)], [[0, size]], [[0, 1], everybody]):
        refused(functools.partial(hvd.init, process_sets=map(hvd.ProcessSet, bad)), "ProcessSet(")
        assert not hvd.is_initialized()
    good = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])]
    hvd.init(process_sets=good)
    assert good[0].ranks == [0, 1] and type(good[0].ranks) is list and hvd.global_process_set.ranks == [0, 1, 2]
    for each in good:
        if each.included():
            assert total(each) == sum(each.ranks)
    hvd.shutdown()
    # The job and its sets are given as communicators. The sets have the ranks of the job.
    backwards = everybody.Split(0, -own)
    mine = hvd.ProcessSet(everybody.Split(own % 2, own))
    hvd.init(comm=backwards, process_sets=[mine])
    assert mine.ranks == sorted(size - 1 - r for r in range(size) if r % 2 == own % 2)
    assert total(mine) == sum(r for r in range(size) if r % 2 == own % 2)


def strangers() -> None:
    """A process set with a process that is not in the job is refused."""
    if own < 2:
        hvd.init([0, 1])
        refused(
            lambda: hvd.add_process_set(hvd.ProcessSet(everybody)), "ranks [2] of MPI.COMM_WORLD are not in this job"
        )
        assert total() == 1


def disagree() -> None:
    """The processes of a job name different ranks. Every process gets an error."""
    refused(lambda: hvd.init([0, 1] if own == 0 else range(size)), "the processes of a job name the same ranks")


def refused(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(text)):
        call()


def arguments() -> None:
    """Arguments that are wrong on any process. Nothing is sent: each process finds the error by itself."""
    refused(lambda: hvd.init([r for r in range(size) if r != own]), "this process's rank is not there")
    refused(lambda: hvd.init([own, own]), "more than once")
    refused(lambda: hvd.init([own, size]), f"{size} is not a rank")
    refused(lambda: hvd.init([own, "a"]), "'a' is not a rank")
    refused(lambda: hvd.init(MPI.COMM_NULL), "intracommunicator")
    refused(lambda: hvd.init(process_sets="static"), 'or "dynamic"')
    hvd.init(comm=None, process_sets=[[0]])
    assert total() == sum(range(size))


{f.__name__: f for f in (ranks, communicator, process_sets, equal_sets, strangers, disagree, arguments)}[sys.argv[1]]()
print(f"rank {own} is done")
