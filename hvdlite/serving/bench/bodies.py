"""What is sent: bodies from files, or random ones of a shape."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdlite.errors import ArgumentError

NPY = "application/x-npy"
KINDS = {".json": "application/json", ".npy": NPY, ".msgpack": "application/msgpack", ".txt": "text/plain"}
DIFFERENT = 64


@dataclass(frozen=True)
class Bodies:
    """Bodies of one content type, which are sent in turn.

    Attributes:
        kind: The content type.
        data: The bodies, one at least.
    """

    kind: str
    data: tuple[bytes, ...]


def from_files(paths: Sequence[Path], kind: str | None) -> Bodies:
    """Read bodies.

    Args:
        paths: Files of one kind, one at least.
        kind: The content type; if None, that of the suffix.

    Raises:
        ArgumentError: The content type is not known, or there are several.
        OSError: A file cannot be read.
    """
    kinds = {kind or KINDS.get(path.suffix) for path in paths}
    found = kinds.pop()
    if found is None or kinds:
        names = " ".join(map(str, paths))
        raise ArgumentError(
            f"--body {names}: expected files of one of the kinds {', '.join(KINDS)}, or --content-type."
        )
    return Bodies(found, tuple(path.read_bytes() for path in paths))


def random(shape: Sequence[int], dtype: str, as_json: bool, seed: int = 0) -> Bodies:
    """Make 64 different bodies with an array each: as `numpy.save` writes it, or as JSON ``{"input": …}``.

    Args:
        shape: The shape of an array.
        dtype: Its dtype. Floating numbers are from 0 to 1, integers from 0 to 9.
        as_json: Whether to write JSON.
        seed: Where chance begins.

    Raises:
        ArgumentError: The dtype has no numbers.
    """
    try:
        of = np.dtype(dtype)
    except TypeError as error:
        raise ArgumentError(f"--dtype {dtype}: {error}.") from None
    if of.kind not in "biuf":
        raise ArgumentError(f"--dtype {dtype}: expected one of integers or floating numbers.")
    chance = np.random.default_rng(seed)
    arrays = [
        (chance.random(shape) if of.kind == "f" else chance.integers(0, 2 if of.kind == "b" else 10, shape)).astype(of)
        for _ in range(DIFFERENT)
    ]
    if as_json:
        return Bodies(KINDS[".json"], tuple(json.dumps({"input": array.tolist()}).encode() for array in arrays))
    return Bodies(NPY, tuple(map(_npy, arrays)))


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()
