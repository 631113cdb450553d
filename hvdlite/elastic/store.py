"""The committed states of one host, as files in memory that outlives the processes.

A file has its name only once it is whole: it is written under another name, and renamed. Its form is that of
`hvdlite.launcher_link.commit_file`. hvdliterun may hold a file by another name while it copies it; such a file is not written
again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdlite.errors import CommitError
from hvdlite.launch.worker.shared_memory import make_private
from hvdlite.launcher_link import commit_file
from hvdlite.launcher_link.commit_file import CommitFile
from hvdlite.launcher_link.generation import CommitId

_KEPT = 2
_DRAFT = ".draft"
_PARTS_AT_ONCE = 512  # Linux takes at most 1024 buffers in one write


@dataclass(frozen=True)
class Commit:
    """One commit that a host has.

    Attributes:
        id: Which commit it is.
        size: The number of ranks that have made it.
        saved: The state.
    """

    id: CommitId
    size: int
    saved: dict[str, Any]


class Store:
    """The committed states of this host, for one call of ``elastic.run``. One rank of each host uses it.

    Args:
        directory: The directory of the job. It is created unless it is there.
        key: The secret of the job.
        call: The number of the call of ``elastic.run`` in the program, from 0 on.

    Raises:
        CommitError: The directory cannot be created, or others may use it.
    """

    def __init__(self, directory: str, key: str, call: int = 0) -> None:
        self._directory, self._key, self._call = directory, key.encode(), call
        try:
            make_private(directory)
            for name in os.listdir(directory):  # the rank that wrote it was killed
                if name.startswith(f"commit.{call}.") and name.endswith(_DRAFT):
                    os.unlink(os.path.join(directory, name))
        except OSError as error:
            raise CommitError(f"no directory for what is committed: {error}") from error

    def write(self, commit: Commit) -> None:
        """Keep a commit, beside the one before it. Older ones are removed.

        Raises:
            CommitError: The state cannot be pickled, or there is no room for it.
        """
        parts = self._encode(commit)
        path = self._path(commit.id)
        draft = path + _DRAFT
        try:
            self._reuse_oldest(draft)
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                size = sum(len(part) for part in parts)
                os.ftruncate(descriptor, size)
                os.posix_fallocate(descriptor, 0, size)  # if there is no room, this says so before anything is written
                _write(descriptor, parts)
            finally:
                os.close(descriptor)
            os.rename(draft, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise CommitError(self._why(error, parts)) from error

    def newest(self) -> Commit | None:
        """Return the newest commit that is whole; None if there is none."""
        for path in reversed(self._files()):
            if (found := commit_file.read(path, self._call, self._key)) is not None:
                return Commit(found.id, found.size, pickle.loads(found.stream, buffers=found.arrays))
        return None

    def _encode(self, commit: Commit) -> list[memoryview]:
        buffers: list[pickle.PickleBuffer] = []
        try:
            stream = pickle.dumps(commit.saved, protocol=5, buffer_callback=buffers.append)
        except Exception as error:
            raise CommitError(_unpicklable(commit.saved, error)) from error
        content = CommitFile(commit.id, commit.size, memoryview(stream), [buffer.raw() for buffer in buffers])
        return [memoryview(commit_file.head_of(self._call, content, self._key)), content.stream, *content.arrays]

    def _reuse_oldest(self, draft: str) -> None:
        """Make room: the oldest commit becomes the draft of the new one, so that its memory is used again."""
        surplus = self._files()[: 1 - _KEPT]
        for path in surplus[1:]:
            os.unlink(path)
        if surplus:
            os.rename(surplus[0], draft)
            if os.stat(draft).st_nlink > 1:  # nobody can begin to hold it now: it has lost its name
                os.unlink(draft)

    def _files(self) -> list[str]:
        """Return the files of the commits, the oldest first."""
        with contextlib.suppress(OSError):
            return [self._path(each) for call, each in commit_file.commits_in(self._directory) if call == self._call]
        return []

    def _path(self, commit: CommitId) -> str:
        return os.path.join(self._directory, commit_file.name_of(self._call, commit))

    def _why(self, error: OSError, parts: Sequence[memoryview]) -> str:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            return f"the state cannot be written to {self._directory}: {error.strerror or error}"
        needed = sum(len(part) for part in parts)
        try:
            free = f"{shutil.disk_usage(self._directory).free / 2**20:.1f} MiB are free"
        except OSError:
            free = "there is less"
        return (
            f"the state takes {needed / 2**20:.1f} MiB, and {free} in {os.path.dirname(self._directory)}. Two commits are kept "
            "on each host. Make it larger (mount -o remount,size=…; docker run --shm-size=…), or name a folder that has room "
            "on every host: hvdliterun --commit-directory"
        )


def _write(descriptor: int, parts: Sequence[memoryview]) -> None:
    left = [part for part in parts if part.nbytes]
    while left:
        written = os.writev(descriptor, left[:_PARTS_AT_ONCE])
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if written:
            left[0] = left[0][written:]


def _unpicklable(saved: Mapping[str, Any], error: Exception) -> str:
    """Say which attribute of the state cannot be pickled."""
    for name, value in saved.items():
        try:
            pickle.dumps(value, protocol=5, buffer_callback=lambda _: None)
        except Exception as reason:
            return (
                f"the attribute {name!r} of the state, of type {type(value).__name__}, cannot be pickled: "
                f"{type(reason).__name__}: {reason}. Keep in the state what can be pickled, and make the rest anew"
            )
    return f"the state cannot be pickled: {type(error).__name__}: {error}"
