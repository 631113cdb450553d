"""Signal handlers call operations, and end operations by exceptions. Prints a line for each part that succeeds."""

import signal
import time

import numpy as np

import hvdlite as hvd


class TimedOut(Exception):
    """The exception that signal handlers raise."""


def raise_timeout(*_: object) -> None:
    raise TimedOut


hvd.init()
rank = hvd.rank()
done = 0


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

signal.signal(signal.SIGALRM, raise_timeout)
for turn in range(3):
    if rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            hvd.allreduce(np.full(1000, 1.0), hvd.Sum, f"late {turn}")
            raise AssertionError("rank 1 is not there yet")
        except TimedOut:
            pass
    else:
        time.sleep(0.3)
        assert (hvd.allreduce(np.full(1000, 2.0), hvd.Sum, f"late {turn}") == 3).all()
    assert (hvd.allreduce(np.full(1000, turn), hvd.Sum, f"after {turn}") == 2 * turn).all()
print("out of waits: all right", flush=True)

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
