"""`load`: all ranks load the newest checkpoint that is whole."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdlite.checkpoint import behind, disk, manifest
from hvdlite.checkpoint.disk import UnreadableError
from hvdlite.checkpoint.folder import Folder
from hvdlite.checkpoint.manifest import Manifest
from hvdlite.checkpoint.ranks import CheckpointRanks
from hvdlite.checkpoint.states import Stateful, stateful
from hvdlite.checkpoint.structure import Reader, files_of
from hvdlite.checkpoint.tensor_file import Stored, tensors_in
from hvdlite.errors import ArgumentError, CheckpointError
from hvdlite.protocols import Array
from hvdlite.ranks.process_set import ProcessSet


class Loaded(dict[str, Any]):
    """The values of a checkpoint that are no object's state. It is true even if there are none.

    Attributes:
        path: The folder of the checkpoint; on ranks that do not see it, where it is on rank 0.
        ranks: How many ranks saved it.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = on_ranks(2, lambda: hvdlite.checkpoint.save(folder, epoch=3))
        ...     (found,) = on_ranks(1, lambda: hvdlite.checkpoint.load(folder))
        >>> found["epoch"], found.path.name, found.ranks
        (3, 'checkpoint-00000001', 2)
    """

    def __init__(self, values: Mapping[str, Any], path: Path, ranks: int) -> None:
        super().__init__(values)
        self.path = path
        self.ranks = ranks

    def __bool__(self) -> bool:
        return True


def load(
    path: str | os.PathLike[str],
    /,
    *,
    allow_pickle: bool = False,
    process_set: ProcessSet | None = None,
    **objects: Any,
) -> Loaded | None:
    """Load the newest checkpoint that is whole, on any number of ranks. Every rank calls this, at the same point.

    ``found = hvd.checkpoint.load("checkpoints", model=model, optimizer=optimizer)`` sets the states of `model` and
    `optimizer`, and returns the other values that were saved, such as ``found["epoch"]``. Afterwards all ranks have the same.

    Rank 0 decides which checkpoint it is. The ranks that see the folder map its files and check a part of each, and one of them
    sends it to those that do not see it: so the folder may be on the disk of rank 0 only. If a file is missing or is not as it
    was saved (its length and its checksum are known), all ranks load the checkpoint before, and rank 0 warns.

    Args:
        path: The folder that `save` was given. Rank 0's counts.
        allow_pickle: Whether pickled values are loaded, which can run anything: say so if you trust whoever wrote the files.
        process_set: The ranks that load; all if None. Then "rank 0" is the first of them.
        objects: The objects whose state is set, by the names that `save` was given. A checkpoint may have more of them.

    Returns:
        The other values. Arrays and tensors are new ones; tensors are in host memory. None if there is no checkpoint; then
        nothing has changed.

    Raises:
        ArgumentError: The checkpoint does not have one of these names, an object has no state to set, or the checkpoint has
            pickled values. The text says what the checkpoint has.
        CheckpointError: There are checkpoints, and none is whole; or an object refuses its state, because it is another model,
            or an optimizer of another class. Nothing has changed then, unless the object itself has found it while it loaded.
        MismatchError: The ranks load different things.
        HvdliteError: A rank is missing. (All ranks raise the same error, but where a rank is missing.)

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = on_ranks(2, lambda: hvdlite.checkpoint.save(folder, epoch=3))
        ...     on_ranks(3, lambda: hvdlite.checkpoint.load(folder)["epoch"])
        [3, 3, 3]
    """
    ranks = CheckpointRanks("checkpoint.load()", process_set)
    behind.finish(ranks)
    ranks.check_same("names", list(objects))
    folder = Folder(Path(path))
    targets: dict[str, Stateful] = {}
    ranks.all_do("looking at what to load", lambda: targets.update(_targets_of(objects)))
    reasons: list[str] = []
    for number in ranks.first_does("looking for checkpoints", folder.numbers):
        found = ranks.first_does("reading", lambda number=number: _read_manifest(folder.of(number)))  # type: ignore[misc]
        if isinstance(found, Manifest):
            _check_names(found, targets, path)
            files = _read_files(folder.of(number), found, targets, ranks)
            if not isinstance(files, str):
                break
            found = files
        reasons.append(f"{folder.of(number).name}: {found}")
    else:
        if reasons:
            raise CheckpointError(
                f"no checkpoint in {os.fspath(path)!r} is whole:\n" + "\n".join(reasons) + "\n"
                "To begin anew, move that folder away."
            )
        return None
    if reasons and ranks.is_first:
        warnings.warn(
            f"hvdlite: {folder.of(found.number).name} is loaded, because newer checkpoints are not whole: "
            f"{'; '.join(reasons)}.",
            RuntimeWarning,
            stacklevel=2,
        )
    reader, sharing = Reader(files, allow_pickle), Reader(files, allow_pickle, copies=False)
    values: dict[str, Any] = {}
    states: dict[str, Any] = {}

    def check() -> None:
        values.update({name: reader.value_of(tree) for name, tree in found.values.items()})
        for name, target in targets.items():
            states[name] = (sharing if target.copies else reader).value_of(found.states[name])
            target.check(states[name], ranks.rank, ranks.size)

    def restore() -> None:
        for name, target in targets.items():
            target.restore(states.pop(name), ranks.rank, ranks.size)
            target.have_same_state()

    # What one object refuses, none gets: they belong together.
    ranks.all_do("looking whether the states fit", check)
    # No rank goes on before all have their state: what they have may be memory that all share.
    ranks.all_do("setting the states", restore)
    return Loaded(values, folder.of(found.number), found.ranks)


def _targets_of(objects: Mapping[str, Any]) -> dict[str, Stateful]:
    """Return what sets the state of each object.

    Raises:
        ArgumentError: An object has no state to set.
    """
    found = {}
    for name, value in objects.items():
        target = stateful(value)
        if target is None:
            raise ArgumentError(
                f"{name}= is a {type(value).__name__}, which has no state to set (no load_state_dict): leave it out, and take "
                f"it from what load() returns: found[{name!r}]."
            )
        found[name] = target
    return found


def _read_manifest(folder: Path) -> Manifest | str:
    """Return the manifest of a checkpoint, or why it cannot be read."""
    try:
        return manifest.read(folder)
    except UnreadableError as error:
        return str(error)


def _check_names(found: Manifest, targets: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    missing = [name for name in targets if name not in found.states]
    if missing:
        raise ArgumentError(
            f"the checkpoint in {os.fspath(path)!r} has no state of {', '.join(missing)}. It has states of "
            f"{', '.join(found.states) or 'nothing'}, and the values {', '.join(found.values) or '(none)'}."
        )


def _read_files(
    folder: Path, found: Manifest, targets: Mapping[str, Any], ranks: CheckpointRanks
) -> dict[str, dict[str, Stored]] | str:
    """Return the tensors of the files that are needed, on all ranks, or why a file cannot be read. Every rank calls this."""
    trees = [*(found.states[name] for name in targets), *found.values.values()]
    needed = sorted(set().union(*map(files_of, trees)) if trees else ())
    # A rank that sees the same manifest sees the files; the first one does.
    readers = [rank for rank, sees in enumerate(ranks.all_do("reading", lambda: _sees(folder, found))) if sees]
    contents: dict[str, Array] = {}

    def read() -> tuple[str, dict[str, dict[int, bytes]]]:
        parts: dict[str, dict[int, bytes]] = {}
        if ranks.rank not in readers:
            return "", parts
        place = readers.index(ranks.rank)
        try:
            for name in needed:
                number = -(-found.files[name].bytes // disk.CHUNK)
                mine = range(place, number, len(readers))
                parts[name] = disk.check_file(folder / name, found.files[name], mine)
                contents[name] = disk.map_file(folder / name, found.files[name])
        except UnreadableError as error:
            return str(error), {}
        return "", parts

    told = ranks.all_do("reading", read)
    failed = list(dict.fromkeys(text for text, _ in told if text))
    if not failed:
        failed = [
            f"{name} has another checksum (SHA-256) than when it was saved"
            for name in needed
            if _checksum(name, [parts for _, parts in told]) != found.files[name].sha256
        ]
    if failed:
        return ", ".join(failed)
    if len(readers) < ranks.size:
        for number, name in enumerate(needed):
            sender = readers[number % len(readers)]
            contents[name] = ranks.send(contents.get(name), found.files[name].bytes, sender)

    tensors: dict[str, dict[str, Stored]] = {}

    def parse() -> str:
        try:
            for name in needed:
                tensors[name] = tensors_in(contents[name])
        except (ValueError, KeyError, TypeError) as error:
            return f"{name} is no file of tensors: {error}"
        return ""

    return next(filter(None, ranks.all_do("reading", parse)), "") or tensors


def _checksum(name: str, told: Sequence[Mapping[str, Mapping[int, bytes]]]) -> str:
    """Return the checksum of a file, of whose parts each rank has some."""
    parts = {number: part for each in told for number, part in each.get(name, {}).items()}
    return disk.checksum_of(part for _, part in sorted(parts.items()))


def _sees(folder: Path, wanted: Manifest) -> bool:
    found = _read_manifest(folder)
    return isinstance(found, Manifest) and found == wanted
