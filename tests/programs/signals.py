"""Signal handlers call operations, and end operations by exceptions. Prints a line for each part that succeeds."""

import random
import signal
import time
from types import FrameType

import numpy as np
from mpi4py import MPI

import hvdlite as hvd
from hvdlite.comm.ballot import Ballot
from hvdlite.operations.negotiation.engine import Waiters
from hvdlite.operations.negotiation.express import Express


class TimedOut(Exception):
    """The exception that signal handlers raise."""


def raise_timeout(*_: object) -> None:
    raise TimedOut


def raise_in_a_wait(_number: int, frame: FrameType | None) -> None:
    """Raise TimedOut if the signal has interrupted a wait that has told the others what it waits for; else try again soon."""
    while frame is not None:
        if frame.f_code is Waiters.wait.__code__ and frame.f_locals.get("spins", 0) > 20:
            raise TimedOut
        frame = frame.f_back
    signal.setitimer(signal.ITIMER_REAL, 0.005)


AT_ONCE = {Ballot.agree.__code__, Ballot._all_show.__code__, Express.run.__code__, Express.allreduce.__code__}


def raise_in_a_small_operation(_number: int, frame: FrameType | None) -> None:
    """Raise TimedOut if the signal has interrupted the ranks' attempt to run an operation at once; else try again soon.

    A signal that has come just before the timer is stopped is handled after that, and must not start it anew.
    """
    if not may_interrupt:
        return
    while frame is not None:
        if frame.f_code in AT_ONCE:
            raise TimedOut
        frame = frame.f_back
    signal.setitimer(signal.ITIMER_REAL, 20e-6)


hvd.init()
rank = hvd.rank()
done = 0
may_interrupt = False


def handler(*_: object) -> None:
    """Run an allreduce with the other rank's handler.

    In the middle of an exchange the allreduce is refused. The handler then runs again a moment later.
    """
    global done
    try:
        done += hvd.allreduce(np.ones(1), hvd.Sum, f"in handler {done}")[0] == 2
    except hvd.HvdliteError as error:
        if "in a signal handler" not in str(error):
            raise
        signal.setitimer(signal.ITIMER_REAL, 0.005)


# One rank is interrupted while it sleeps, the other one while it waits for the first one.
signal.signal(signal.SIGALRM, handler)
for turn in range(4):
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    if rank == turn % 2:
        while done <= turn:
            time.sleep(0.001)
    assert (hvd.allreduce(np.full(200_000, turn), hvd.Sum, f"main {turn}") == 2 * turn).all()
    while done <= turn:
        time.sleep(0.001)
print("in handlers: all right", flush=True)

# Rank 0 leaves its waits by an exception at any moment. Nothing is under way in them, so it stays in step.
signal.signal(signal.SIGALRM, raise_in_a_wait)
for turn, delay in enumerate(np.random.default_rng(1).uniform(0.0005, 0.003, 500)):
    if rank == 0:
        signal.setitimer(signal.ITIMER_REAL, delay)
        try:
            hvd.allreduce(np.full(1000, 1.0), hvd.Sum, f"late {turn}")
            raise AssertionError("rank 1 is not there yet")
        except TimedOut:
            MPI.COMM_WORLD.send(turn, 1)
    else:
        assert MPI.COMM_WORLD.recv(source=0) == turn
        assert (hvd.allreduce(np.full(1000, 2.0), hvd.Sum, f"late {turn}") == 3).all()
    assert (hvd.allreduce(np.full(1000, turn), hvd.Sum, f"after {turn}") == 2 * turn).all()
print("out of waits: all right", flush=True)

# Rank 0 leaves small operations at any moment. It is in step afterwards; or it was bound to one, and both ranks get an error.
signal.signal(signal.SIGALRM, raise_in_a_small_operation)
rng = random.Random(rank)
left = broken = 0
for _ in range(30):
    pair = hvd.new_group([0, 1])
    try:
        for turn in range(100):
            until = time.perf_counter() + rng.choice([0, 0, 1e-5, 1e-4, 5e-4])
            while time.perf_counter() < until:
                pass
            if rank == 0 and turn % 3 == 2:
                may_interrupt = True
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 4e-4))
            try:
                assert hvd.allreduce(np.full(2, turn), hvd.Sum, process_set=pair).tolist() == [2 * turn] * 2
            except TimedOut:
                left += 1
            finally:
                may_interrupt = False
                signal.setitimer(signal.ITIMER_REAL, 0)
    except hvd.CommunicationError:
        broken += 1
    hvd.barrier()
assert rank == 1 or left > broken, (left, broken)
print(f"out of small operations: all right ({left} times, {broken} times bound)", flush=True)

signal.signal(signal.SIGALRM, raise_timeout)
delays = np.random.default_rng(0).uniform(0.001, 0.03, 200)
interrupted = False
for turn, delay in enumerate(delays):
    if rank == 0:
        signal.setitimer(signal.ITIMER_REAL, delay)
    try:
        assert (hvd.allreduce(np.full(2_000_000, turn, np.float32), hvd.Sum, f"large {turn}") == 2 * turn).all()
    except TimedOut:
        interrupted = True
    except hvd.CommunicationError:
        break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
print("out of exchanges: all right", flush=True)
