"""Removes what an elastic job has committed from the memory of all hosts, when hvdliterun has ended, even if it was killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from typing import NoReturn

from hvdlite.launch.elastic.state_folder import StateFolder
from hvdlite.launch.job.hosts import Host
from hvdlite.launch.job.signals import outlive_terminal
from hvdlite.launch.job.ssh import remove_elsewhere

_SECONDS = 5.0  # so long may ranks of a job that was killed still write


class Janitor:
    """A process that waits until hvdliterun ends, and then removes a directory on all hosts of the job.

    Args:
        directory: The directory.
        ssh: The options of ssh; None if plain ssh does not reach the hosts, so that only this machine is cleaned.
        state: The folder whose writer copies from the directory, until it has ended; None if there is none.
    """

    def __init__(self, directory: str, ssh: Sequence[str] | None, state: StateFolder | None = None) -> None:
        self._known: set[str] = set()
        read, self._write = os.pipe()
        self._left, left = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._write)
            os.close(self._left)
            _serve(read, left, directory, ssh, state)
        os.close(read)
        os.close(left)

    def add(self, hosts: Iterable[Host]) -> None:
        """Note hosts on which the directory may be."""
        for name in {host.name for host in hosts} - self._known:
            self._known.add(name)
            os.write(self._write, f"{name}\n".encode())

    def finish(self) -> list[str]:
        """Let the process remove the directory now, and wait for it. Return the hosts on which the directory may be left."""
        os.close(self._write)
        with open(self._left) as left:
            names = left.read().split()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        return names


def _serve(read: int, left: int, directory: str, ssh: Sequence[str] | None, state: StateFolder | None) -> NoReturn:
    try:
        if state is not None:
            state.let_go()
        outlive_terminal()
        names = b""
        while data := os.read(read, 4096):
            names += data
        if state is not None:
            state.wait_for_writer()
        _remove(directory)
        if ssh is not None:
            kept = remove_elsewhere([Host(name, 1) for name in names.decode().split()], ssh, directory)
            with contextlib.suppress(BrokenPipeError):  # hvdliterun was killed
                os.write(left, " ".join(kept).encode())
    finally:
        os._exit(0)


def _remove(directory: str) -> None:
    deadline = time.monotonic() + _SECONDS
    while os.path.lexists(directory) and time.monotonic() < deadline:
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.01)
