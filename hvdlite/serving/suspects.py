"""Inputs that did harm lately, by a hash of their values. One that has ended replicas is refused, one that raised is computed
alone."""

from __future__ import annotations

import enum
import hashlib
import io
import pickle
from collections import OrderedDict
from typing import Any

import numpy as np

_MOST = 1024
"""So many inputs are remembered."""


class Harm(enum.Enum):
    """What an input did, and for how many seconds that is remembered."""

    RAISED = 60.0
    LOST = 300.0


class Suspects:
    """What is remembered. While this is nothing, no hash is computed."""

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, tuple[Harm, float]] = OrderedDict()

    def remember(self, value: Any, harm: Harm, now: float) -> None:
        """Remember an input.

        Args:
            value: The input: an array, or a value of Python's own types with arrays in it.
            harm: What it did.
            now: The time in seconds.
        """
        self._found[_hash(value)] = harm, now + harm.value
        if len(self._found) > _MOST:
            self._found.popitem(last=False)

    def harm_of(self, value: Any, now: float) -> tuple[Harm, float] | None:
        """Return what an input did lately, and for how many seconds more that is remembered; None if it did nothing."""
        if not self._found:
            return None
        while self._found and next(iter(self._found.values()))[1] <= now:
            self._found.popitem(last=False)
        harm, until = self._found.get(_hash(value), (None, 0.0)) if self._found else (None, 0.0)
        return None if harm is None or until <= now else (harm, until - now)


def _hash(value: Any) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    if isinstance(value, np.ndarray):
        found.update(f"{value.dtype.str}{value.shape}".encode())
        found.update(np.ascontiguousarray(value).data)
    else:
        text = io.BytesIO()
        pickler = pickle.Pickler(text, 5)
        pickler.fast = True  # else the text depends on which equal values are one object
        pickler.dump(value)
        found.update(text.getbuffer())
    return found.digest()
