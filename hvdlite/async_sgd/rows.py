"""Sparse gradients: some rows of a tensor, and how they travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from hvdlite.protocols import Array

_ALIGNMENT = 16


class Rows(NamedTuple):
    """The rows of a sparse gradient. A row is what the first index of a tensor selects.

    Attributes:
        indices: Their numbers: int64, shape ``(rows,)``. If one occurs several times, the sum of its rows counts.
        values: Their elements in C order: uint8, ``rows`` times the bytes of a row.
    """

    indices: Array
    values: Array


def add_rows(one: Rows, other: Rows) -> Rows:
    """Return the sum of two sparse gradients of one tensor."""
    return Rows(*map(np.concatenate, zip(one, other, strict=True)))


def pack_rows(rows: Mapping[int, Rows]) -> Array:
    """Return the rows of some tensors as one message: uint8.

    For each tensor it has three numbers of int64, which are the key, the number of rows, and the bytes of the values; then the
    indices, and the values. Each of these begins at a multiple of 16 bytes.
    """
    pieces = []
    for key, (indices, values) in rows.items():
        head = np.array([key, len(indices), len(values)], np.int64)
        pieces += [_padded(head.view(np.uint8)), _padded(indices.view(np.uint8)), _padded(values)]
    return np.concatenate(pieces) if pieces else np.empty(0, np.uint8)


def unpack_rows(data: Array) -> dict[int, Rows]:
    """Return what `pack_rows` has packed, as views."""
    rows, at = {}, 0

    def take(nbytes: int) -> Array:
        nonlocal at
        piece = data[at : at + nbytes]
        at += _ceil(nbytes)
        return piece

    while at < len(data):
        key, count, nbytes = take(24).view(np.int64).tolist()
        rows[key] = Rows(take(8 * count).view(np.int64), take(nbytes))
    return rows


def _padded(piece: Array) -> Array:
    return np.pad(piece, (0, _ceil(len(piece)) - len(piece)))


def _ceil(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
