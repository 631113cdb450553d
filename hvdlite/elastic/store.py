"""The committed states of one host, as files in memory that outlives the processes.

    MAGIC, length of the head, HMAC of the head, head (JSON: which commit, number of ranks, lengths, checksums), pickle, arrays

A file has its name only once it is whole: it is written under another name, and renamed. Nothing is unpickled before the HMACs
of the head and of the pickle were checked, so this job has written it. The arrays lie behind the pickle as they are
(out-of-band buffers of pickle's protocol 5), and have a checksum.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import pickle
import re
import shutil
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdlite.errors import CommitError
from hvdlite.launch.worker.shared_memory import make_private
from hvdlite.launcher_link.generation import CommitId

_MAGIC = b"hvdlite commit 1\n"
_START = struct.Struct(">I32s")
_LONGEST_HEAD = 1 << 26
_KEPT = 2
_DRAFT = ".draft"
_NAME = re.compile(r"commit\.([0-9]+)\.([0-9]+)\.([0-9]+)")
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
        path = os.path.join(self._directory, f"commit.{self._call}.{commit.id.generation}.{commit.id.number}")
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
        for name, _ in reversed(self._files()):
            if (found := self._read(os.path.join(self._directory, name))) is not None:
                return found
        return None

    def _encode(self, commit: Commit) -> list[memoryview]:
        buffers: list[pickle.PickleBuffer] = []
        try:
            stream = pickle.dumps(commit.saved, protocol=5, buffer_callback=buffers.append)
        except Exception as error:
            raise CommitError(_unpicklable(commit.saved, error)) from error
        arrays = [buffer.raw() for buffer in buffers]
        head = json.dumps(
            {
                "call": self._call,
                "id": commit.id,
                "size": commit.size,
                "pickle": [len(stream), self._seal(stream).hex()],
                "arrays": [[array.nbytes, zlib.crc32(array)] for array in arrays],
            }
        ).encode()
        start = _MAGIC + _START.pack(len(head), self._seal(head)) + head
        return [memoryview(start), memoryview(stream), *arrays]

    def _seal(self, data: bytes | memoryview) -> bytes:
        return hmac.digest(self._key, data, "sha256")

    def _reuse_oldest(self, draft: str) -> None:
        """Make room: the oldest commit becomes the draft of the new one, so that its memory is used again."""
        surplus = [os.path.join(self._directory, name) for name, _ in self._files()][: 1 - _KEPT]
        for path in surplus[1:]:
            os.unlink(path)
        if surplus:
            os.rename(surplus[0], draft)

    def _files(self) -> list[tuple[str, CommitId]]:
        """Return the names of the commits, the oldest first."""
        found = []
        with contextlib.suppress(OSError):
            for name in os.listdir(self._directory):
                match = _NAME.fullmatch(name)
                if match is not None and int(match[1]) == self._call:
                    found.append((name, CommitId(int(match[2]), int(match[3]))))
        return sorted(found, key=lambda each: each[1])

    def _read(self, path: str) -> Commit | None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with open(descriptor, "rb", buffering=0) as file:
                data = memoryview(bytearray(os.fstat(descriptor).st_size))
                filled = 0
                while filled < len(data) and (count := file.readinto(data[filled:])):
                    filled += count
        except OSError:
            return None
        return self._decode(data[:filled])

    def _decode(self, data: memoryview) -> Commit | None:
        """Read a commit. Return None if it is not whole, or this job has not written it."""
        start = len(_MAGIC) + _START.size
        if len(data) < start or data[: len(_MAGIC)] != _MAGIC:
            return None
        length, seal = _START.unpack(data[len(_MAGIC) : start])
        head, rest = data[start : start + length], data[start + length :]
        if length > _LONGEST_HEAD or not hmac.compare_digest(seal, self._seal(head)):
            return None
        fields = json.loads(bytes(head))  # this job has written it
        length, tag = fields["pickle"]
        stream, rest = rest[:length], rest[length:]
        if fields["call"] != self._call or not hmac.compare_digest(bytes.fromhex(tag), self._seal(stream)):
            return None
        arrays = []
        for length, checksum in fields["arrays"]:
            array, rest = rest[:length], rest[length:]
            if len(array) != length or zlib.crc32(array) != checksum:
                return None
            arrays.append(array)
        return Commit(CommitId(*fields["id"]), fields["size"], pickle.loads(stream, buffers=arrays))

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
