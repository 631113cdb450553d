"""The manifest of a checkpoint: what it has, and what each of its files must be."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hvdlite.checkpoint.disk import FileRecord, UnreadableError, open_plain
from hvdlite.checkpoint.structure import Tree

NAME = "manifest.json"
_FORMAT = 2


class Manifest(NamedTuple):
    """What a checkpoint has.

    Attributes:
        number: Its number: later checkpoints have higher ones.
        ranks: How many ranks saved it.
        files: What each file must be, by its name.
        states: The trees of what objects' ``state_dict()`` and the like returned, by the names that the program gave.
        values: The trees of other values, by these names.
    """

    number: int
    ranks: int
    files: Mapping[str, FileRecord]
    states: Mapping[str, Tree]
    values: Mapping[str, Tree]

    def chunks(self) -> Iterator[bytes]:
        """Return the content of the file, which ends with a checksum of the rest."""
        files = {name: record._asdict() for name, record in self.files.items()}
        text = json.dumps({"format": _FORMAT, **self._asdict(), "files": files}, indent=1)
        yield f'{{"checkpoint": {text},\n"sha256": "{_digest(text)}"}}\n'.encode()


def read(folder: Path) -> Manifest:
    """Return the manifest of the checkpoint in a folder.

    Raises:
        UnreadableError: It is not there, or not whole, or of another version of hvdlite.
    """
    try:
        with open_plain(folder / NAME) as file:
            text = file.read().decode()
    except OSError as error:
        raise UnreadableError(f"{NAME} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{NAME} is not a text") from error
    try:
        told: dict[str, Any] = json.loads(text)
        content = told["checkpoint"]
        inner = text[text.index(": ") + 2 : text.rindex(',\n"sha256"')]
        whole = told["sha256"] == _digest(inner) and json.loads(inner) == content
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableError(f"{NAME} is damaged: {error}") from error
    if not whole:
        raise UnreadableError(f"{NAME} has another checksum (SHA-256) than when it was saved")
    if content.pop("format") != _FORMAT:
        raise UnreadableError(f"{NAME} is of another version of hvdlite")
    files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
    return Manifest(files=files, **content)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
