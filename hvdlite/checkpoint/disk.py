"""Everything that changes the disk: files are written to the end and synchronized, folders too, before anything refers to them.

Tests replace this module's `os`, to let each call fail.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import mmap
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvdlite.protocols import Array

CHUNK = 1 << 24
"""The most bytes that are written, read or sent at once."""


class FileRecord(NamedTuple):
    """What a file must be: its length in bytes, and its checksum (see `Checksum`) in hexadecimal digits."""

    bytes: int
    sha256: str


class Checksum:
    """The SHA-256 of the SHA-256s of a file's parts, each of `CHUNK` bytes but the last: so that ranks can share the work.

    Attributes:
        parts: The SHA-256s of the parts that are complete.
    """

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._part, self._filled = hashlib.sha256(), 0

    def update(self, data: memoryview) -> None:
        """Add bytes."""
        while data:
            fits, data = data[: CHUNK - self._filled], data[CHUNK - self._filled :]
            self._part.update(fits)
            self._filled += len(fits)
            if self._filled == CHUNK:
                self._end_part()

    def hexdigest(self) -> str:
        """Return the checksum. Nothing is added after that."""
        if self._filled:
            self._end_part()
        return checksum_of(self.parts)

    def _end_part(self) -> None:
        self.parts.append(self._part.digest())
        self._part, self._filled = hashlib.sha256(), 0


def checksum_of(parts: Iterable[bytes]) -> str:
    """Return the checksum of a file, by the SHA-256s of its parts."""
    return hashlib.sha256(b"".join(parts)).hexdigest()


class UnreadableError(Exception):
    """A file is not what its record says, or cannot be read. The text says why."""


def write_file(path: Path, chunks: Iterable[Any]) -> FileRecord:
    """Write a new file, and return when it is on the disk.

    Args:
        path: The file, which is not there yet.
        chunks: The content, as contiguous buffers.

    Raises:
        OSError: The file cannot be written, for example because the disk is full.
    """
    digest, length = Checksum(), 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for chunk in chunks:
            rest = memoryview(chunk).cast("B")
            digest.update(rest)
            length += len(rest)
            while rest:
                rest = rest[os.write(file, rest[:CHUNK]) :]
        os.fsync(file)
    finally:
        os.close(file)
    return FileRecord(length, digest.hexdigest())


def check_file(path: Path, record: FileRecord, check: Iterable[int]) -> dict[int, bytes]:
    """Return the SHA-256s of some parts of a file (see `Checksum`), by their numbers.

    Args:
        path: The file.
        record: What it must be. The caller compares the checksum.
        check: The numbers of the parts.

    Raises:
        UnreadableError: The file is not there, cannot be read, or has another length.
    """
    parts: dict[int, bytes] = {}
    with _opened(path, record) as file:
        memory = np.empty(min(CHUNK, record.bytes), np.uint8)
        for number in check:
            begin = number * CHUNK
            part = memory[: record.bytes - begin]
            file.seek(begin)
            if file.readinto(part.data) != len(part):  # it has become shorter meanwhile
                raise UnreadableError(f"{path.name} ends too early")
            parts[number] = hashlib.sha256(part.data).digest()
    return parts


def map_file(path: Path, record: FileRecord) -> Array:
    """Return the content of a file: uint8, shape ``(record.bytes,)``. It is read when it is used, and written to nowhere.

    Raises:
        UnreadableError: The file is not there, cannot be read, or has another length.
    """
    with _opened(path, record) as file:
        return np.frombuffer(mmap.mmap(file.fileno(), record.bytes, access=mmap.ACCESS_COPY), np.uint8)


@contextlib.contextmanager
def _opened(path: Path, record: FileRecord) -> Iterator[io.FileIO]:
    try:
        with open_plain(path) as file:
            found = os.fstat(file.fileno()).st_size
            if found != record.bytes:
                raise UnreadableError(f"{path.name} has {found} bytes, and should have {record.bytes}")
            yield file
    except OSError as error:
        raise UnreadableError(f"{path.name} cannot be read: {error.strerror or error}") from error


def open_plain(path: Path) -> io.FileIO:
    """Open a file to be read. Nothing is waited for, whatever is in its place.

    Raises:
        UnreadableError: A link is there, or a FIFO, a device or a folder.
        OSError: It cannot be opened.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnreadableError(f"{path.name} is a link, and no file") from error
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise UnreadableError(f"{path.name} is no file, but something else of that name")
    return io.FileIO(file, "rb")


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are not there.

    Raises:
        OSError: It cannot be made.
    """
    if path.is_dir():
        return
    make_folder(path.parent)
    with contextlib.suppress(FileExistsError):  # another process makes it
        os.mkdir(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Return when the names in a folder are on the disk.

    Raises:
        OSError: The folder cannot be synchronized.
    """
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def rename(path: Path, name: str) -> Path:
    """Give a file or a folder another name in the same folder, and return its new path when that is on the disk.

    Raises:
        OSError: It cannot be renamed.
    """
    new = show(path, name)
    sync_folder(path.parent)
    return new


def show(path: Path, name: str) -> Path:
    """Give a file another name in the same folder for other processes to see. After a power failure it may have the old one.

    Raises:
        OSError: It cannot be renamed.
    """
    new = path.with_name(name)
    os.rename(path, new)
    return new


def remove_file(path: Path) -> None:
    """Remove a file, and return when all names in its folder are on the disk.

    Raises:
        OSError: It cannot be removed.
    """
    os.unlink(path)
    sync_folder(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder and the files in it.

    Raises:
        OSError: It cannot be removed. Some of its files may be gone.
    """
    for name in os.listdir(path):
        os.unlink(path / name)
    os.rmdir(path)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold a lock in the body that one process at a time can have, until it ends.

    Args:
        path: The file of the lock. It is made if need be, and stays.

    Yields:
        Whether this process has the lock. On a file system that has no locks, every process has it.

    Raises:
        OSError: The file cannot be opened, or is no plain file.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o622)
    try:
        _keep_readers_out(file, path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # some network file systems
            pass
        yield True
    finally:
        os.close(file)


def _keep_readers_out(file: int, path: Path) -> None:
    """Let those open the file of a lock who may write it, and nobody else: whoever has it open can hold the lock."""
    mode = os.fstat(file).st_mode
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no file, but something else of that name", str(path))
    writers = mode & 0o222
    if mode & 0o777 != writers << 1 | writers:
        with contextlib.suppress(PermissionError):  # it is another user's, who lets this one write
            os.fchmod(file, writers << 1 | writers)
