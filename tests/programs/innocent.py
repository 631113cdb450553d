"""A training in which nothing is wrong, and something takes long: ``innocent.py KIND RANK``. See `tests.support.innocent`."""

from __future__ import annotations

import atexit
import ctypes
import os
import subprocess
import sys
import time

import numpy as np

import hvdlite as hvd
from hvdlite import elastic
from tests.support.innocent import LONG, PAUSE

KIND, RANK = sys.argv[1], int(sys.argv[2])
STEPS, SLOW = 40, 20


def compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        np.ones((100, 100)) @ np.ones((100, 100))


def pause(pid: int, script: str) -> None:
    """Let a process that is none of the job's stop and continue this one."""
    subprocess.Popen(["sh", "-c", script.format(pid=pid)], start_new_session=True).wait()


def slow(step: int) -> None:
    mine = hvd.rank() == RANK
    match KIND:
        case "first" if mine and step == 0:  # it fills its cache of data
            time.sleep(LONG)
        case "evaluation" if hvd.rank() == 0 and step == SLOW:
            compute(LONG)
        case "compile" if (
            step == SLOW
        ):  # in C code that holds Python's lock, on all ranks, on one longer than on others
            ctypes.PyDLL(None).sleep(int(LONG / 2) + (3 if mine else 0))
        case "stop" if mine and step == SLOW:
            pause(os.getpid(), f"kill -STOP {{pid}}; sleep {PAUSE}; kill -CONT {{pid}}")
        case "stop_guard" if mine and step == SLOW:
            pause(os.getppid(), f"kill -STOP {{pid}}; sleep {PAUSE}; kill -CONT {{pid}}")
        case "swap" if mine and step == SLOW:  # it runs for moments, as a process does whose pages are fetched
            pause(
                os.getpid(),
                "for i in 1 2 3 4 5 6 7 8 9 10; do kill -STOP {pid}; sleep 0.9; kill -CONT {pid}; sleep 0.05; done",
            )


@elastic.run
def train(state: elastic.ObjectState) -> None:
    while state.step < STEPS:
        slow(state.step)
        state.total += float(hvd.allreduce(np.ones(1000), hvd.Sum)[0])
        state.step += 1
        state.commit()


if KIND == "start" and int(os.environ["OMPI_COMM_WORLD_RANK"]) == RANK:
    time.sleep(LONG)
hvd.init()
state = elastic.ObjectState(step=0, total=0.0)
train(state)
if KIND == "save" and hvd.rank() == RANK:
    time.sleep(LONG)
if KIND == "exit" and hvd.rank() == RANK:
    atexit.register(time.sleep, PAUSE)
print(f"rank {hvd.rank()} of {hvd.size()} has made {state.step} steps, {state.total:.0f}")
