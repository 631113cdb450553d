"""The files of MPI's shared memory in ``/dev/shm``: each job has its own, and none stays behind.

Open MPI's go into a directory that hvdliterun names and each host's guards create; MPICH's are found
in the memory map of the rank. The standard library only: guards load this file without the package,
see worker.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile

_VARIABLE = "OMPI_MCA_btl_sm_backing_directory"
_MEMORY = "/dev/shm"
_NAME = "hvdlite."


def new_directory(flavour: str) -> str:
    """A name for the directory of one job of this MPI, on each of its hosts; empty if it needs none."""
    if flavour != "openmpi" or not os.path.isdir(_MEMORY):
        return ""
    # What nobody may write to, as in some containers, is replaced by the folder for temporary files.
    folder = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else tempfile.gettempdir()
    return os.path.join(folder, f"{_NAME}{os.getpid()}.{os.urandom(8).hex()}")


def create_directory() -> None:
    """Create the directory that hvdliterun named, unless another rank of this host has.

    Raises:
        OSError: It cannot be created, or it is somebody else's.
    """
    if directory := _directory():
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, mode=0o700)
        found = os.lstat(directory)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{directory} was made by another user, or others may use it")


def leave_directory() -> None:
    """Remove the directory if this rank is the last one on its host that used it."""
    if directory := _directory():
        with contextlib.suppress(OSError):  # other ranks of this host still use it
            os.rmdir(directory)


def sweep(pid: int) -> None:
    """Remove the shared memory of a job that ends early: where nothing fails, MPI does it itself.

    Args:
        pid: The rank's process.
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
