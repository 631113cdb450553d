"""The files of MPI's shared memory in ``/dev/shm``: each job has its own files, and none stays behind.

The files of Open MPI go into a directory; hvdliterun chooses its name, and the guards of each host create it. The files of
MPICH are found in the memory map of the rank. This file imports only the standard library: guards load it without the
package, see worker.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile

_VARIABLE = "OMPI_MCA_btl_sm_backing_directory"
_MEMORY = "/dev/shm"
_NAME = "hvdlite."
_TRIES = 100


def new_directory(flavour: str, before: str = "") -> str:
    """Choose a name for the directory of one job, the same on all its hosts. The name is empty if the job needs none.

    Args:
        flavour: The MPI, "openmpi" or "mpich".
        before: The name that an earlier start of the same job had. The new one differs in its last number only, so the guards
            of a host that was cut off know what the earlier start has left there.
    """
    if flavour != "openmpi" or not os.path.isdir(_MEMORY):
        return ""
    first = f"{name_in_memory(_NAME)}.0"
    return re.sub(r"\d+$", lambda found: str(int(found[0]) + 1), before) if before else first


def name_in_memory(beginning: str) -> str:
    """Choose the path of a new directory in ``/dev/shm``. The folder for temporary files takes its place if it is not writable.

    Args:
        beginning: How the name of the directory begins.
    """
    folder = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else tempfile.gettempdir()
    return os.path.join(folder, f"{beginning}{os.getpid()}.{os.urandom(8).hex()}")


def create_directory() -> None:
    """Create the directory that hvdliterun named, unless another rank of this host has created it.

    Raises:
        OSError: The directory cannot be created, belongs to another user, or is open to others.
    """
    if directory := _directory():
        for left in reversed(range(_TRIES)):
            try:
                make_private(directory)
                # A mark of this guard: a rank that ends before the others start MPI must not take the directory from them.
                with open(_mark(directory), "xb"):
                    break
            except FileNotFoundError:  # a rank that has ended took the empty directory, before there was this mark
                if not left:
                    raise
        _remove_earlier(directory)


def _remove_earlier(directory: str) -> None:
    """Remove the directories that earlier starts of the same job have left: their host was cut off, and has come back."""
    folder, name = os.path.split(directory)
    mark = name.rpartition(".")[0] + "."
    if name.count(".") < 3:  # it has no mark of its job
        return
    for entry in os.scandir(folder):
        is_earlier = entry.name.startswith(mark) and entry.name != name and entry.is_dir(follow_symlinks=False)
        if is_earlier and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
            shutil.rmtree(entry.path, ignore_errors=True)


def make_private(directory: str) -> None:
    """Create a directory that only this user may use, unless it is there.

    Raises:
        OSError: It cannot be created, belongs to another user, or is open to others.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, mode=0o700)
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{directory} was made by another user, or others may use it")


def leave_directory() -> None:
    """Remove this guard's mark from the directory, and the directory if it is empty: then no rank of this host uses it."""
    if directory := _directory():
        with contextlib.suppress(OSError):  # other ranks of this host still use it
            os.unlink(_mark(directory))
            os.rmdir(directory)


def _mark(directory: str) -> str:
    return os.path.join(directory, f"guard.{os.getpid()}")


def sweep(pid: int) -> None:
    """Remove the shared memory files of a job that ends early. If nothing fails, MPI removes them itself.

    Args:
        pid: The process id of the rank's program.
    """
    for path in _mpich_segments(pid):
        with contextlib.suppress(OSError):
            os.unlink(path)
    if directory := _directory():
        shutil.rmtree(directory, ignore_errors=True)


def _mpich_segments(pid: int) -> set[str]:
    try:
        with open(f"/proc/{pid}/maps") as maps:
            return {line.split(maxsplit=5)[5].strip() for line in maps if "/dev/shm/mpich_shm_" in line}
    except OSError:
        return set()


def _directory() -> str:
    directory = os.environ.get(_VARIABLE, "")
    return directory if os.path.basename(directory).startswith(_NAME) else ""
