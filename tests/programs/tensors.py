"""Models for tests/serving/test_serving_protocols.py: they return what they get, in several ways."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from hvdlite import servable

DTYPES = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("u", "") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
)

every = servable(
    lambda batch: [{name: rows[place] for name, rows in batch.items()} for place in range(len(batch["bool"]))],
    inputs={dtype: (dtype, (2, None)) for dtype in DTYPES},
)
"""Has an input and an output of each dtype."""

row = servable(lambda batch: 2 * batch, dtype="float32", shape=(3,))


def anything(batch: Any) -> list[Any]:
    """Take whatever comes. Some texts ask for outputs that are no tensors."""
    odd: dict[Any, Any] = {
        "none": None,
        "nan": np.nan,
        "bytes": b"\xff\0",
        "pair": (np.arange(2), "two"),
        "ragged": [[1], [2, 3]],
    }
    return [odd.get(each, each) if isinstance(each, str) else each for each in batch]


class Weights:
    """A model whose weights are read from a file when it is imported, as others are."""

    def __init__(self, path: Path) -> None:
        while path.read_text() == "wait":
            time.sleep(0.1)
        self._scale = float(path.read_text())  # raises if they do not fit

    def __call__(self, batch: Any) -> Any:
        """Multiply."""
        return batch * self._scale


if "WEIGHTS" in os.environ:
    weights = servable(Weights(Path(os.environ["WEIGHTS"])), dtype="float64", shape=())
