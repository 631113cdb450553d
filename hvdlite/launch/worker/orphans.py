"""Orphans are processes that a rank started and left behind. This file ends them, even those in sessions of their own.

A daemon of the MPI launcher is one too, if its host is cut off: it asks the launcher for permission to end, and waits for an
answer for a quarter of an hour.

Linux makes them children of the rank's guard, and they end with the guard. If somebody killed the guard, they become children
of hvdliterun, if it runs on the same host. The processes that an orphan started come along, so nobody has to search for them.
On other systems than Linux nothing adopts them.

This file imports only the standard library: guards load it without the package, see worker.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Collection

_PAUSE_SECONDS = 0.01
_ROUNDS = 1000
_SET_CHILD_SUBREAPER = 36


def adopt() -> None:
    """From now on a descendant of this process whose parent ends becomes a child of this process. Linux only."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end(grace: float, but: Collection[int] = ()) -> None:
    """End the children of this process, and the processes that become its children when those end.

    Args:
        grace: The children get so many seconds to end by themselves, then a SIGTERM, and after as many seconds a SIGKILL.
        but: The process ids of children that stay.
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
                if waited >= 2 * grace:
                    os.kill(pid, signal.SIGKILL)
                elif waited >= grace and pid not in told:
                    told.add(pid)
                    os.kill(pid, signal.SIGTERM)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_PAUSE_SECONDS)


def end_daemon() -> None:
    """End the daemon of Open MPI 5 that has started this guard, and remove its folder.

    mpirun, which starts the guards of its own host, is no such daemon: its folder has another name.
    """
    parent, folder = os.getppid(), os.environ.get("PMIX_SERVER_TMPDIR", "")
    if os.path.basename(folder) == f"prted.{parent}":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(parent, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def children(pid: int) -> list[int]:
    """Return the ids of the child processes of `pid`, also of those that have ended and were not waited for."""
    try:
        found = ""
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += file.read() + " "
        return [int(word) for word in found.split()]
    except OSError:  # the process has ended, the kernel keeps no such list, or this is not Linux
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
    except OSError:  # the process has ended meanwhile
        return -1
