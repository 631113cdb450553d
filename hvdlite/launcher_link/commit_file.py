"""The form of a file that holds one commit of an elastic job.

    MAGIC, length of the head, HMAC of the head, head (JSON: which commit, number of ranks, lengths, checksums), pickle, arrays

The arrays lie behind the pickle as they are (out-of-band buffers of pickle's protocol 5), and have a checksum. The head and the
pickle are sealed with the key of the job, so that nothing is unpickled that the job has not written. This file imports only the
standard library, and unpickles nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from hvdlite.launcher_link.generation import CommitId

_MAGIC = b"hvdlite commit 1\n"
_START = struct.Struct(">I32s")
_LONGEST_HEAD = 1 << 26
_NAME = re.compile(r"commit\.([0-9]+)\.([0-9]+)\.([0-9]+)")


class CommitFile(NamedTuple):
    """The content of a file that is whole.

    Attributes:
        id: Which commit it is.
        size: The number of ranks that have made it.
        stream: The pickle.
        arrays: Its buffers.
    """

    id: CommitId
    size: int
    stream: memoryview
    arrays: Sequence[memoryview]


def name_of(call: int, commit: CommitId) -> str:
    """Return the name of the file of a commit.

    Args:
        call: The number of the call of ``elastic.run`` in the program, from 0 on.
        commit: Which commit it is.
    """
    return f"commit.{call}.{commit.generation}.{commit.number}"


def commits_in(directory: str) -> list[tuple[int, CommitId]]:
    """Return the commits that have a file in a directory, each with the number of its call; the oldest of a call first.

    Raises:
        OSError: The directory cannot be read.
    """
    found = [match for name in os.listdir(directory) if (match := _NAME.fullmatch(name))]
    return sorted((int(match[1]), CommitId(int(match[2]), int(match[3]))) for match in found)


def head_of(call: int, commit: CommitFile, key: bytes) -> bytes:
    """Return what comes before the pickle and the arrays of a commit."""
    head = json.dumps(
        {
            "call": call,
            "id": commit.id,
            "size": commit.size,
            "pickle": [len(commit.stream), _seal(commit.stream, key).hex()],
            "arrays": [[array.nbytes, zlib.crc32(array)] for array in commit.arrays],
        }
    ).encode()
    return _MAGIC + _START.pack(len(head), _seal(head, key)) + head


def read(path: str, call: int, key: bytes) -> CommitFile | None:
    """Read a file. Return None if it is not there or not whole, or this job has not written it for this call."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(descriptor, "rb", buffering=0) as file:
            data = memoryview(bytearray(os.fstat(descriptor).st_size))
            filled = 0
            while filled < len(data) and (count := file.readinto(data[filled:])):
                filled += count
    except OSError:
        return None
    return _parse(data[:filled], call, key)


def _parse(data: memoryview, call: int, key: bytes) -> CommitFile | None:
    start = len(_MAGIC) + _START.size
    if len(data) < start or data[: len(_MAGIC)] != _MAGIC:
        return None
    length, seal = _START.unpack(data[len(_MAGIC) : start])
    head, rest = data[start : start + length], data[start + length :]
    if length > _LONGEST_HEAD or not hmac.compare_digest(seal, _seal(head, key)):
        return None
    fields = json.loads(bytes(head))  # this job has written it
    length, tag = fields["pickle"]
    stream, rest = rest[:length], rest[length:]
    if fields["call"] != call or not hmac.compare_digest(bytes.fromhex(tag), _seal(stream, key)):
        return None
    arrays = []
    for length, checksum in fields["arrays"]:
        array, rest = rest[:length], rest[length:]
        if len(array) != length or zlib.crc32(array) != checksum:
            return None
        arrays.append(array)
    return CommitFile(CommitId(*fields["id"]), fields["size"], stream, arrays)


def remove_older(directory: str, call: int, keep: int) -> None:
    """Remove the files of a call but for its newest ones. What cannot be removed stays."""
    ours = [commit for number, commit in commits_in(directory) if number == call]
    for commit in ours[:-keep]:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(directory, name_of(call, commit)))


def _seal(data: bytes | memoryview, key: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")
