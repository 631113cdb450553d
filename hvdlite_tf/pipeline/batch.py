"""Cuts batches into micro-batches."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import keras
import tensorflow as tf

from hvdlite.errors import ArgumentError


def length_of(values: Any) -> int:
    """Return the number of samples: the length of the first of nested tensors."""
    return int(keras.tree.flatten(values)[0].shape[0])


def part_of(values: Any, begin: int, end: int) -> Any:
    """Return some samples of nested tensors; None stays None."""
    return keras.tree.map_structure(
        lambda tensor: None if tensor is None else tf.convert_to_tensor(tensor[begin:end]), values, none_is_leaf=True
    )


def cut(values: Any, parts: int) -> list[Any]:
    """Return nested tensors cut along the first axis into at most `parts` parts of nearly equal size.

    Raises:
        ArgumentError: There are no samples.
    """
    rows = length_of(values)
    if rows == 0:
        raise ArgumentError("there are no samples in this batch. Leave it out.")
    short, longer = divmod(rows, min(parts, rows))
    bounds = [0, *accumulate(short + (number < longer) for number in range(min(parts, rows)))]
    return [part_of(values, a, b) for a, b in pairwise(bounds)]
