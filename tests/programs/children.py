"""Each rank forks children that end in different ways, while the ranks go on. Prints how the children ended."""

import os
import sys

import numpy as np

import hvdlite as hvd
from hvdlite.api import world
from hvdlite.protocols import TensorInfo

hvd.init()
rank, size = hvd.rank(), hvd.size()
reducer = world().group().reducers.make([TensorInfo("float32", (10_000,))])
memory = reducer.memory_of(0).view(np.float32)
memory[:] = rank


def operation() -> None:
    for call in (
        lambda: hvd.allreduce(np.ones(3)),
        lambda: hvd.allreduce(np.ones(300_000)),
        lambda: reducer.exchange([True]),
        lambda: hvd.barrier_async(),
    ):
        try:
            call()
        except hvd.HvdliteError as error:
            if f"was forked from rank {rank} (pid {os.getppid()}) after hvdlite.init()" not in str(error):
                os._exit(3)
        else:
            os._exit(2)
    os._exit(0)


def write() -> None:
    """Write into memory that the ranks share."""
    memory[:] = 1000.0
    os._exit(int(memory[5] != 1000.0))


def ask() -> None:
    os._exit(int((hvd.rank(), hvd.size()) != (rank, size)))


def shut_down() -> None:
    hvd.shutdown()
    os._exit(0)


def leave() -> None:
    sys.exit(5)


def fail() -> None:
    raise ValueError("of a child")


def come_to_the_end() -> None:
    raise SystemExit


EXPECTED = {operation: 0, write: 0, ask: 0, shut_down: 0, leave: 5, fail: 1, come_to_the_end: 0}
ends = {}
for function in EXPECTED:
    child = os.fork()
    if child == 0:
        function()
    ends[function] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert (hvd.allreduce(np.full(100_000, rank + 1.0), hvd.Sum) == sum(range(1, size + 1))).all()
assert reducer.exchange([True]) == [True]
result = reducer.result_of(0).view(np.float32)
assert (result == sum(range(size)) / size).all(), result[:3]
wrong = {function.__name__: code for function, code in ends.items() if code != EXPECTED[function]}
print(f"rank {rank} of {size}: children ended {wrong or 'as they should'}", flush=True)
