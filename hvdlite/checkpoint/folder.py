"""The checkpoints in a folder. Each is a folder with a number, which gets its name when all of it is on the disk."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from hvdlite.checkpoint import disk
from hvdlite.errors import ArgumentError, CheckpointError

_DONE, _UNFINISHED, _OLD = "checkpoint-", ".unfinished-", ".old-"
_LOCK, _TOKEN = ".lock", "token"


class Folder:
    """The folder that a program names. Other files in it are left alone.

    Args:
        path: The folder, which need not be there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def numbers(self) -> list[int]:
        """Return the numbers of the checkpoints, the newest first.

        Raises:
            ArgumentError: There is a file of that name.
            OSError: The folder cannot be read.
        """
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise ArgumentError(f"{str(self.path)!r} is a file: name a folder for checkpoints.") from None
        found = [name.removeprefix(_DONE) for name in names if name.startswith(_DONE)]
        return sorted((int(number) for number in found if number.isdecimal()), reverse=True)

    def of(self, number: int) -> Path:
        """Return the folder of a checkpoint."""
        return self.path / f"{_DONE}{number:08d}"

    @contextlib.contextmanager
    def saving(self) -> Iterator[Unfinished]:
        """Return a context manager that begins a checkpoint, which is removed again unless the body finishes it.

        Raises:
            ArgumentError: There is a file of that name.
            CheckpointError: Another process is saving there.
            OSError: The folder cannot be made.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ArgumentError(f"{str(self.path)!r} is a file: name a folder for checkpoints.")
        disk.make_folder(self.path)
        with disk.locked(self.path / _LOCK) as mine:
            if not mine:
                raise CheckpointError(
                    f"another job is saving a checkpoint in {str(self.path)!r}: give each job a folder of its own."
                )
            self._remove_leftovers()  # nobody else is saving, so what is unfinished will remain so
            number = max(self.numbers(), default=0) + 1
            unfinished = Unfinished(self, number)
            try:
                unfinished.begin()
                yield unfinished
            finally:
                with contextlib.suppress(OSError):
                    self._remove_leftovers()

    def remove_all_but(self, keep: int) -> None:
        """Remove all checkpoints but the newest ones.

        Raises:
            OSError: One cannot be removed.
        """
        for number in reversed(self.numbers()[keep:]):
            disk.remove_folder(disk.rename(self.of(number), f"{_OLD}{number:08d}"))

    def _remove_leftovers(self) -> None:
        for name in os.listdir(self.path):
            if name.startswith((_UNFINISHED, _OLD)):
                disk.remove_folder(self.path / name)


class Unfinished:
    """A checkpoint that is being saved, on the rank that began it.

    Args:
        folder: The folder of all checkpoints.
        number: Its number.

    Attributes:
        name: The name of its folder for now.
        token: A text that is in the folder, by which other ranks know that they see the same one.
    """

    def __init__(self, folder: Folder, number: int) -> None:
        self.number = number
        self.name = f"{_UNFINISHED}{number:08d}"
        self.token = secrets.token_hex(16)
        self._folder = folder

    @property
    def path(self) -> Path:
        return self._folder.path / self.name

    def begin(self) -> None:
        """Make the folder.

        Raises:
            OSError: It cannot be made.
        """
        disk.make_folder(self.path)
        disk.write_file(self.path / _TOKEN, [self.token.encode()])

    def finish(self) -> Path:
        """Give the checkpoint its name, and return its folder. All of its files are on the disk.

        Raises:
            OSError: It cannot be renamed.
        """
        disk.remove_file(self.path / _TOKEN)
        return disk.rename(self.path, self._folder.of(self.number).name)


def is_seen(folder: Path, token: str) -> bool:
    """Return whether this rank sees the unfinished checkpoint that another rank has begun.

    Args:
        folder: The folder of the unfinished checkpoint.
        token: See `Unfinished`.
    """
    try:
        with disk.open_plain(folder / _TOKEN) as file:
            return file.read().decode() == token
    except (OSError, disk.UnreadableError):
        return False
