"""Checkpoints that are written behind the training: ``save(..., wait=False)``.

    save ── copy ── the ranks agree ──▶ the training goes on
                         │
                         └─ a thread of each rank: write this rank's files, sync ── say so, by a file ──┐
                            the first rank's: wait for these files of all ── manifest ── rename  ◀──────┘

The threads exchange nothing with other ranks but files, so they get in no operation's way. What has failed is told by the next
call, on all ranks.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

from hvdlite.api import before_leaving, world
from hvdlite.checkpoint import disk
from hvdlite.checkpoint.disk import CHUNK, FileRecord
from hvdlite.checkpoint.ranks import CheckpointRanks
from hvdlite.errors import CheckpointError
from hvdlite.protocols import Array
from hvdlite.ranks.process_set import ProcessSet
from hvdlite.runtime.world import World

_POLL_SECONDS = 0.02


class First(NamedTuple):
    """What the first rank's thread does beside the writing of its own files.

    Attributes:
        ranks: The numbers of the other ranks that have files.
        finish: Makes the checkpoint whole, of the records of all files. It returns a warning, or an empty text.
        end: Removes what was begun, unless it is whole.
    """

    ranks: Sequence[int]
    finish: Callable[[Mapping[str, FileRecord]], str]
    end: Callable[[], None]


class Behind:
    """A checkpoint that is being written, on one rank.

    Args:
        path: The folder that it gets.
        target: The folder in which its files are for now.
        contents: The contents of this rank's files, by name. Nobody changes them before `finish` has returned.
        ranks: The ranks that save.
        process_set: The same; all if None.
        first: What the first rank does; None on others.
    """

    def __init__(
        self,
        path: Path,
        target: Path,
        contents: dict[str, Array],
        ranks: CheckpointRanks,
        process_set: ProcessSet | None,
        first: First | None,
    ) -> None:
        self._name, self._target, self._contents, self._first = path.name, target, contents, first
        self.process_set = process_set
        self._rank = ranks.rank
        self._world = weakref.ref(world())
        self._given_up = threading.Event()
        self._part_is_over = threading.Event()
        self._part_error: Exception | None = None
        self._error: Exception | None = None
        self._warning = ""
        self._thread = threading.Thread(target=self._run, name="hvdlite-checkpoint", daemon=True)
        _under_way.setdefault(world(), {})[tuple(ranks.world_ranks)] = self
        self._thread.start()

    def finish(self, ranks: CheckpointRanks) -> dict[str, Array]:
        """Wait until the checkpoint is whole. Every rank calls this.

        Returns:
            The contents of this rank's files, whose memory is free.

        Raises:
            CheckpointError: It could not be written. What was begun is removed.
        """
        what = f"writing {self._name} behind the training"
        try:
            ranks.all_do(what, self._end_of_part)
            ranks.first_does(what, self._end)
        except BaseException:
            self._given_up.set()
            self._thread.join()
            raise
        if self._warning:
            warnings.warn(self._warning, RuntimeWarning, stacklevel=4)
        return self._contents

    def _end_of_part(self) -> None:
        self._part_is_over.wait()
        if self._part_error is not None:
            raise self._part_error

    def _end(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            if self._first is not None:
                stack.callback(self._first.end)
            try:
                records = {
                    name: disk.write_file(self._target / name, self._cut(each)) for name, each in self._contents.items()
                }
                if self._first is None and records:
                    _write_records(self._target, self._rank, records)
            except Exception as error:
                self._part_error = error
                self._part_is_over.set()
                while self._first is not None and not self._is_given_up():  # the other ranks still write
                    self._given_up.wait(_POLL_SECONDS)
                return
            self._part_is_over.set()
            if self._first is not None:
                try:
                    self._warning = self._first.finish(self._all_records(records, self._first.ranks))
                except Exception as error:
                    self._error = error

    def _cut(self, content: Array) -> Iterator[Array]:
        for begin in range(0, len(content), CHUNK):
            self._go_on()
            yield content[begin : begin + CHUNK]

    def _go_on(self) -> None:
        """Raise CheckpointError if the checkpoint cannot become whole any more."""
        if self._is_given_up():
            raise CheckpointError(f"{self._name} has been given up, because a rank has failed.")

    def _is_given_up(self) -> bool:
        here = self._world()
        return self._given_up.is_set() or here is None or here.over

    def _all_records(self, records: Mapping[str, FileRecord], others: Sequence[int]) -> dict[str, FileRecord]:
        """Return the records of the files of all ranks, when these have written them."""
        found = dict(records)
        for rank in others:
            while (told := _read_records(self._target, rank)) is None:
                self._go_on()
                time.sleep(_POLL_SECONDS)
            found.update(told)
        return found


_under_way: WeakKeyDictionary[World, dict[tuple[int, ...], Behind]] = WeakKeyDictionary()
"""The checkpoints that ranks write, one at most for the ranks that save together."""


def finish(ranks: CheckpointRanks) -> dict[str, Array]:
    """Wait for the checkpoint that these ranks write, if there is one. See `Behind.finish`."""
    behind = _under_way.get(world(), {}).pop(tuple(ranks.world_ranks), None)
    return {} if behind is None else behind.finish(ranks)


def wait(process_set: ProcessSet | None = None) -> None:
    """Wait until the checkpoint of the last ``save(..., wait=False)`` is whole. Every rank calls this, at the same point.

    The next `save` and `load` of the same ranks, `shutdown`, and the end of the program do so by themselves.

    Args:
        process_set: The ranks that save; all if None.

    Raises:
        CheckpointError: The checkpoint could not be written. What was there before is there still. All ranks raise it.

    Examples:
        >>> import tempfile
        >>> def saved(folder):
        ...     path = hvdlite.checkpoint.save(folder, wait=False, epoch=3)
        ...     hvdlite.checkpoint.wait()
        ...     return path.is_dir()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     on_ranks(2, saved, folder)
        [True, True]
    """
    finish(CheckpointRanks("checkpoint.wait()", process_set))


def _finish_all(here: World) -> None:
    for behind in list(_under_way.get(here, {}).values()):
        finish(CheckpointRanks("shutdown()", behind.process_set))


before_leaving.append(_finish_all)


def _write_records(target: Path, rank: int, records: Mapping[str, FileRecord]) -> None:
    text = json.dumps(records)
    draft = target / f"{records_of(rank)}.draft"
    disk.write_file(draft, [text.encode()])
    disk.show(draft, records_of(rank))  # the first rank may rename the folder at this moment


def _read_records(target: Path, rank: int) -> dict[str, FileRecord] | None:
    try:
        with disk.open_plain(target / records_of(rank)) as file:
            return {name: FileRecord(*record) for name, record in json.loads(file.read()).items()}
    except FileNotFoundError:
        return None


def records_of(rank: int) -> str:
    """Return the name of the file in which a rank says what it has written, until the checkpoint is whole."""
    return f"written.{rank:05d}"
