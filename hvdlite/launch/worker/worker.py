"""The MPI launcher starts this program for each rank: a small guard, and as its child the user's program.

    mpirun ── guard (this file, about 10 MB, asleep) ── fork ── the program, as ``__main__``
                │ TCP to hvdliterun                        │ pipes: stdout, stderr, reports
                └──────────────── select ──────────────────┘

The guard is a separate process, because only a parent learns for certain how a process ended: by a signal, a stop or
``os._exit``. The guard also works while the program holds the GIL, loses no output that was written before a crash, and leaves
nothing running if hvdliterun or mpirun is killed. The guard of a failed rank stays until hvdliterun says "end". Otherwise the
MPI launcher would see the failure before hvdliterun does, kill the other ranks, and hide the reason behind its own messages.

This file is run by its path (``python .../worker.py train.py``), not with ``-m``. ``-m`` would import ``hvdlite`` and NumPy,
whose threads and memory do not belong into the guard, and would let files of the working directory hide the standard library.
So this file imports the parts of the guard through ``_hvdlite``, a package made here: it has the same files, and no
``__init__``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdlite.launch.worker import guard, orphans, program, rank_environment, shared_memory
    from hvdlite.launcher_link import link, session
else:
    _FOLDER = os.path.dirname(os.path.abspath(__file__))
    _folders = (os.path.dirname(os.path.dirname(_FOLDER)), os.path.dirname(_FOLDER), _FOLDER)
    for _name, _folder in zip(("_hvdlite", "_hvdlite.launch", "_hvdlite.launch.worker"), _folders, strict=True):
        sys.modules[_name] = types.ModuleType(_name)
        sys.modules[_name].__path__ = [_folder]
    from _hvdlite.launch.worker import guard, orphans, program, rank_environment, shared_memory
    from _hvdlite.launcher_link import link, session


def main(arguments: list[str]) -> int:
    """Start one rank, guard it, and return the exit code of the guard.

    Args:
        arguments: The words that would follow ``python``, or ``--exec`` and a command.
    """
    rank = rank_environment.own_rank()
    where = f"rank {rank} on {socket.gethostname()}"
    if "HVDLITE_CONTROL" not in os.environ:
        return _refuse(
            f"{where} got no HVDLITE_CONTROL from the MPI launcher: the environment of hvdliterun does not reach this "
            "host. Start the job with hvdliterun itself; where it was, look for what its MPI launcher does to the "
            "environment (--verbose shows the command, --mpi-args adds to it)."
        )
    try:
        address = link.Address.parse(os.environ["HVDLITE_CONTROL"])
    except ValueError as error:
        return _refuse(f"{where}: {error}")
    try:
        connection = link.connect(address)
    except session.ProtocolError as error:
        return _refuse(f"{where}, at {address.host}:{address.port}: {error}. Do all hosts have the same hvdlite?")
    except OSError as error:
        return _refuse(
            f"{where} cannot reach hvdliterun at {address.host}:{address.port} ({error}). "
            "Name a network that all hosts share with --network-interface."
        )
    try:
        shared_memory.create_directory()
    except OSError as error:
        return _refuse(f"{where}: no directory for MPI's shared memory: {error}")
    threads = rank_environment.share_cores()
    rank_environment.set_horovod_variables()
    pipes = [os.pipe(), os.pipe(), os.pipe()]
    guard_pid = os.getpid()
    orphans.adopt()
    child = os.fork()
    if child == 0:
        connection.close()
        for read_end, _ in pipes:
            os.close(read_end)
        program.become_rank(guard_pid, *(write_end for _, write_end in pipes))
        program.run(arguments, pipes[2][1])
    for _, write_end in pipes:
        os.close(write_end)
    with contextlib.suppress(OSError):  # the child does the same: either may come first
        os.setpgid(child, child)
    own_guard = guard.Guard(connection, child, *(read_end for read_end, _ in pipes))
    own_guard.finished = arguments[0] == "--exec"  # such a program cannot report its end: only its exit code counts
    return own_guard.run(
        {
            "rank": rank,
            "host": socket.gethostname(),
            "pid": child,
            "guard": guard_pid,
            "threads": threads,
        }
    )


def _refuse(text: str) -> int:
    print(f"hvdliterun: {text}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
