"""A file that is either whole or as it was before, also if the process is killed while it writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from hvdlite.checkpoint.disk import sync_folder
from hvdlite.errors import ArgumentError


def check_path(path: Path) -> None:
    """Raise ArgumentError unless a file can be written there."""
    if path.is_dir():
        raise ArgumentError(f"checkpoint={str(path)!r} is a folder: name a file in it.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ArgumentError(f"checkpoint={str(path)!r}: there is no folder {path.parent} in which this rank may write.")


def write_whole(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write a file under another name, and give it its name when it is on the disk.

    Raises:
        OSError: It cannot be written. What was there before is there still.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
