"""A file that is either whole or as it was before, also if the process is killed while it writes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import BinaryIO


def write_whole(
    path: str | os.PathLike[str], write: Callable[[BinaryIO], object], *, draft: str, mode: int = 0o666
) -> None:
    """Write a file under another name in the same folder, and give it its name when it is on the disk.

    Args:
        path: The file.
        write: Writes the content.
        draft: The other name. A file of this name is written over.
        mode: The permissions of a new file, of which the process takes away those of its umask.

    Raises:
        OSError: It cannot be written. What was there before is there still.
    """
    folder = os.path.dirname(path)
    unfinished = os.path.join(folder, draft)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(unfinished, flags, mode), "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
        raise
    names = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(names)
    finally:
        os.close(names)
