"""`save`: all ranks save one checkpoint together."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdlite.checkpoint import behind, disk, manifest
from hvdlite.checkpoint.disk import FileRecord
from hvdlite.checkpoint.folder import Folder, Unfinished, is_seen
from hvdlite.checkpoint.manifest import Manifest
from hvdlite.checkpoint.parts import merge, own_part, tensor_keys, what_is_missing
from hvdlite.checkpoint.ranks import CheckpointRanks
from hvdlite.checkpoint.states import Snapshot, stateful
from hvdlite.checkpoint.structure import Tree, Writer
from hvdlite.checkpoint.tensor_file import chunks_of, content_of
from hvdlite.errors import ArgumentError, CheckpointError, ranks_text
from hvdlite.protocols import Array
from hvdlite.ranks.process_set import ProcessSet

_VALUES = "other-values"
"""The file of tensors that are no object's state. No argument in Python can have this name."""


def save(
    path: str | os.PathLike[str],
    /,
    *,
    keep: int = 3,
    allow_pickle: bool = False,
    process_set: ProcessSet | None = None,
    wait: bool = True,
    **state: Any,
) -> Path:
    """Save a checkpoint, which is there whole or not at all. Every rank calls this, at the same point.

    ``hvd.checkpoint.save("checkpoints", model=model, optimizer=optimizer, epoch=3)`` makes a folder like
    ``checkpoints/checkpoint-00000007``. It gets this name when everything in it is on the disk. If a process dies before that,
    or the disk is full, the checkpoints that were there are still there.

    Rank 0 writes. Of what the ranks share, such as the state of an optimizer with ``shard=True``, each rank writes its part.
    A rank that does not see the folder of rank 0 sends its part to rank 0. A checkpoint can be loaded on any number of ranks.

    Args:
        path: The folder of all checkpoints of this training. It is made if need be. Rank 0's counts.
        keep: How many checkpoints are kept; older ones are removed.
        allow_pickle: Whether values that are neither numbers, texts, tensors nor lists, tuples, dictionaries and sets of them
            are pickled. If not, they are an error.
        process_set: The ranks that save; all if None. Then "rank 0" is the first of them.
        wait: Whether the checkpoint is there when `save` returns. If not, the state is copied in memory, and a thread of each
            rank writes it while the training goes on. At most one checkpoint is under way: the next `save`, `load` or
            `checkpoint.wait`, and the end of the program, wait for it, and raise what has failed. All ranks with a part of the
            state must see the folder.
        state: By names of your choice: objects with `state_dict` and `load_state_dict`, such as modules, optimizers, schedules
            and ``GradScaler``; models and optimizers of Keras; and any other values, of which rank 0's are saved.

    Returns:
        The folder of this checkpoint. With ``wait=False`` it is not there yet.

    Raises:
        ArgumentError: `path` is a file, `keep` is less than 1, or a value cannot be saved. The text says where it is.
        MismatchError: The ranks save different things.
        CheckpointError: The checkpoint could not be written. What was there before is there still.
        HvdliteError: A rank is missing. (All ranks raise the same error, but where a rank is missing.)

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [path.name for path in on_ranks(2, lambda: hvdlite.checkpoint.save(folder, epoch=3, weights=np.ones(2)))]
        ['checkpoint-00000001', 'checkpoint-00000001']
    """
    ranks = CheckpointRanks("checkpoint.save()", process_set)
    memory = behind.finish(ranks)
    ranks.check_same("names", list(state))
    folder = Folder(Path(path))

    def look() -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ArgumentError(f"keep={keep!r}: expected how many checkpoints to keep, 1 or more.")
        snapshots.update(_snapshots_of(state, ranks))

    snapshots: dict[str, Snapshot] = {}
    ranks.all_do("looking at what to save", look)
    _leave_out_copies(snapshots, ranks)
    values = {name: value for name, value in state.items() if name not in snapshots}
    with contextlib.ExitStack() as stack:
        job = _FirstRank(folder, keep, stack)
        name, token, saved, waits = ranks.first_does("beginning", lambda: (*job.begin(), wait))
        target = folder.path / name
        own = _Parts.of(snapshots, values, ranks, allow_pickle)
        contents: dict[str, Array] = {}
        # Memory that all ranks share may change when this has returned: then all have copied their parts of it.
        written = own.write(target, token) if waits else own.copy(target, token, contents, memory)

        if (warning := ranks.first_does("finishing", lambda: job.gather(written, waits))) and ranks.is_first:
            warnings.warn(warning, RuntimeWarning, stacklevel=2)
        if not waits:
            first = None
            if ranks.is_first:
                others = [rank for rank, each in enumerate(written) if rank and each.files]
                passing = [behind.records_of(rank) for rank in others]
                first = behind.First(others, functools.partial(job.finish, passing=passing), stack.pop_all().close)
            behind.Behind(saved, target, contents, ranks, process_set, first)
    return saved


def _snapshots_of(state: Mapping[str, Any], ranks: CheckpointRanks) -> dict[str, Snapshot]:
    """Return the states of the objects that have one.

    Raises:
        ArgumentError: Ranks that have a part of an object are not among those that save.
    """
    found = {name: each for name, value in state.items() if (each := stateful(value)) is not None}
    for name, each in found.items():
        if others := sorted(set(each.parts_of) - set(ranks.world_ranks)):
            raise ArgumentError(
                f"parts of {name} are on {ranks_text(sorted(each.parts_of))}, and {ranks_text(others)} of them do not save: "
                "leave out process_set=, or pass one with all stages."
            )
    return {name: each.snapshot(ranks.rank) for name, each in found.items()}


def _leave_out_copies(snapshots: dict[str, Snapshot], ranks: CheckpointRanks) -> None:
    """Leave out of the parts of this rank what a rank before it has. Every rank calls this.

    Raises:
        ArgumentError: The ranks train an object in different groups, so that each group has another one.
    """
    told = ranks.all_do(
        "looking at what to save",
        lambda: {
            name: (each.trained_by, tensor_keys(each.value) if each.on_each_rank else [])
            for name, each in snapshots.items()
        },
    )
    for name, snapshot in snapshots.items():
        groups = sorted({group for each in told if (group := each[name][0]) is not None})
        if len(groups) > 1:
            apart = " and, apart, by ".join(ranks_text(list(each)) for each in groups)
            raise ArgumentError(
                f"checkpoint.save(): {name} is trained by {apart}, and a checkpoint has one: pass process_set=, that of "
                "this rank's optimizer, and a folder for each."
            )
        before = [keys for each in told[: ranks.rank] for keys in each[name][1]]
        snapshots[name] = snapshot._replace(value=own_part(snapshot.value, before))


class _Written(NamedTuple):
    """What one rank has written: its files, and the trees of its states and values."""

    files: dict[str, FileRecord]
    states: dict[str, Tree]
    values: dict[str, Tree]


class _FirstRank:
    """What the first rank does of a checkpoint beside its own part: it begins the folder, and makes it whole.

    Args:
        folder: The folder of all checkpoints.
        keep: How many checkpoints are kept.
        stack: Removes what was begun when it is closed, unless it is whole.
    """

    def __init__(self, folder: Folder, keep: int, stack: contextlib.ExitStack) -> None:
        self._folder, self._keep, self._stack = folder, keep, stack
        self._unfinished: Unfinished
        self._whole: Manifest

    def begin(self) -> tuple[str, str, Path]:
        """Begin the checkpoint. Return the name of its folder for now, the token in it, and the folder that it gets."""
        begun = self._unfinished = self._stack.enter_context(self._folder.saving())
        return begun.name, begun.token, self._folder.of(begun.number)

    def gather(self, written: list[_Written], finishes: bool) -> str:
        """Make the manifest of what all ranks have written; if `finishes`, also the checkpoint whole. See `finish`."""
        self._whole = _manifest_of(written, self._unfinished.number)
        return self.finish({}) if finishes else ""

    def finish(self, files: Mapping[str, FileRecord], passing: Sequence[str] = ()) -> str:
        """Make the checkpoint whole, and remove older ones. Return a warning, or an empty text.

        Args:
            files: The records of files that were written after `gather`.
            passing: The names of files that are not a part of it.
        """
        target, whole = self._unfinished.path, self._whole
        disk.write_file(target / manifest.NAME, whole._replace(files={**whole.files, **files}).chunks())
        for each in passing:
            disk.remove_file(target / each)
        self._unfinished.finish()
        try:
            self._folder.remove_all_but(self._keep)
        except OSError as error:
            return f"hvdlite: an old checkpoint cannot be removed: {error}"
        return ""


class _Parts(NamedTuple):
    """What one rank writes.

    Attributes:
        writers: The tensors of each file.
        states: The trees of states.
        values: The trees of other values.
        ranks: The ranks that save.
    """

    writers: list[Writer]
    states: dict[str, Tree]
    values: dict[str, Tree]
    ranks: CheckpointRanks

    @classmethod
    def of(
        cls, snapshots: Mapping[str, Snapshot], values: Mapping[str, Any], ranks: CheckpointRanks, allow_pickle: bool
    ) -> _Parts:
        """Return what this rank writes of these states and values. Every rank calls this."""
        parts = cls([], {}, {}, ranks)

        def add(trees: dict[str, Tree], name: str, value: Any, file: str) -> None:
            writer = Writer(f"{file}.safetensors", allow_pickle)
            trees[name] = writer.tree_of(value, name)
            if writer.tensors:
                parts.writers.append(writer)

        def prepare() -> None:
            for name, snapshot in snapshots.items():
                if snapshot.on_each_rank and ranks.size > 1:
                    add(parts.states, name, snapshot.value, f"{name}.part-{ranks.rank:05d}")
                elif ranks.is_first:
                    add(parts.states, name, snapshot.value, name)
            for name, value in values.items() if ranks.is_first else ():
                add(parts.values, name, value, f"{name}.{_VALUES}")

        ranks.all_do("looking at what to save", prepare)
        return parts

    def write(self, target: Path, token: str) -> list[_Written]:
        """Write this rank's files, and return what all ranks have written. Every rank calls this.

        Args:
            target: The folder of the checkpoint that the first rank has begun.
            token: The text by which this rank knows whether it sees this folder.
        """
        ranks = self.ranks
        sees = ranks.is_first or not self.writers or is_seen(target, token)
        files: dict[str, FileRecord] = {}

        def write() -> list[str]:
            for writer in self.writers if sees else ():
                files[writer.file] = disk.write_file(target / writer.file, chunks_of(writer.tensors))
            return [] if sees else [writer.file for writer in self.writers]

        left = ranks.all_do("writing", write)
        for sender, names in enumerate(left):
            for name in names:
                self._hand_over(target, name, sender, files)
        return ranks.all_do("writing", lambda: _Written(files, self.states, self.values))

    def copy(self, target: Path, token: str, contents: dict[str, Array], memory: Mapping[str, Array]) -> list[_Written]:
        """Copy what this rank's files will have, and return what all ranks will write. Every rank calls this.

        Args:
            target, token: See `write`.
            contents: Gets the contents, by the names of the files.
            memory: Memory for them, if its length is right.
        """

        def copy() -> _Written:
            if self.writers and not self.ranks.is_first and not is_seen(target, token):
                raise ArgumentError(
                    "a rank with a part of the state does not see the folder of rank 0, and wait=False needs that. Name a "
                    "folder that all hosts share, or leave out wait=False."
                )
            for writer in self.writers:
                contents[writer.file] = content_of(writer.tensors, memory.get(writer.file))
            return _Written(
                {name: FileRecord(len(each), "") for name, each in contents.items()}, self.states, self.values
            )

        return self.ranks.all_do("copying", copy)

    def _hand_over(self, target: Path, name: str, sender: int, files: dict[str, FileRecord]) -> None:
        """Let the first rank write a file of a rank that does not see the folder. Every rank calls this."""
        ranks = self.ranks
        mine = next((writer for writer in self.writers if writer.file == name and ranks.rank == sender), None)
        chunks = ranks.stream(None if mine is None else chunks_of(mine.tensors), sender)

        def write() -> None:
            if ranks.is_first:
                try:
                    files[name] = disk.write_file(target / name, chunks)
                finally:
                    _exhaust(chunks)  # the other ranks still send
            else:
                _exhaust(chunks)

        ranks.all_do("writing", write)


def _exhaust(chunks: Iterator[Any]) -> None:
    for _ in chunks:
        pass


def _manifest_of(written: list[_Written], number: int) -> Manifest:
    """Return the manifest of what all ranks have written.

    Raises:
        CheckpointError: A part of a tensor is missing.
    """
    names = written[0].states
    states = {name: merge([each.states[name] for each in written if name in each.states]) for name in names}
    for name, tree in states.items():
        if missing := what_is_missing(tree, name):
            raise CheckpointError(f"{missing}: some ranks lack their part of the state.")
    files = {name: record for each in written for name, record in each.files.items()}
    return Manifest(number, len(written), files, states, written[0].values)
