"""Processes that a rank started and left behind, also in sessions of their own: they become children of its guard.

They end with it. Without the guard (somebody killed it) they become children of hvdliterun, where that runs on the same
host. What they started themselves comes along, so nothing has to be searched for. Linux only. The standard library only:
guards load this file without the package, see worker.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection

_PAUSE_SECONDS = 0.01
_ROUNDS = 1000
_SET_CHILD_SUBREAPER = 36


def adopt() -> None:
    """From now on processes below this one whose parent ends become children of this one."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end(patience: float, but: Collection[int] = ()) -> None:
    """End the children of this process, and whatever becomes its child when they end.

    Args:
        patience: Seconds in which they may go by themselves, and as many again after a SIGTERM.
        but: Process ids that are not meant.
    """
    start = time.monotonic()
    told: set[int] = set()
    for _ in range(_ROUNDS):
        found = [pid for pid in children(os.getpid()) if pid not in but]
        if not found:
            return
        waited = time.monotonic() - start
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if waited >= 2 * patience:
                    os.kill(pid, signal.SIGKILL)
                elif waited >= patience and pid not in told:
                    told.add(pid)
                    os.kill(pid, signal.SIGTERM)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_PAUSE_SECONDS)


def children(pid: int) -> list[int]:
    """The processes whose parent this is, those that have ended and were not waited for included."""
    try:
        found = ""
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += file.read() + " "
        return [int(word) for word in found.split()]
    except OSError:  # it has ended, or the kernel keeps no such list, or this is no Linux
        return [other for other in _processes() if _parent(other) == pid]


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:  # it has ended meanwhile
        return -1
