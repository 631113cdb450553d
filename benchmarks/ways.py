"""How far training has moved the weights: compares the variants with each other, and the ranks."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np

from benchmarks.plan import STEP_RANKS
from benchmarks.turns import Players

Way = np.ndarray[Any, Any]
"""The change of the weights of one rank since their start, shape ``(parameters,)``."""


class Ways:
    """Compares the ways of several variants with those of the first one. They are in files: a large model's fill the memory.

    Args:
        every: 1 to compare all weights, 8 to compare every eighth.

    Attributes:
        reference: The name of the first variant that was compared.
    """

    def __init__(self, every: int = 1) -> None:
        self._every = every
        self._folder = tempfile.TemporaryDirectory()
        self.reference: str | None = None
        self._truth: list[Way] = []

    def close(self) -> None:
        """Remove the files."""
        self._folder.cleanup()

    def of(self, jobs: Players, name: str, file: str = "own") -> list[Way]:
        """Return the way of each rank of a variant, until the next one is asked for."""
        path = f"{self._folder.name}/{file}-{{rank}}.npy"
        jobs.ask(name, do="save", path=path, every=self._every)
        return [np.load(path.format(rank=rank), mmap_mode="r") for rank in range(STEP_RANKS)]

    def compare(self, jobs: Players, name: str) -> tuple[float, float]:
        """Return the largest distance of a rank's way from that of the reference, and from that of rank 0.

        The first variant that is given becomes the reference.
        """
        if self.reference is None:
            self.reference, self._truth = name, self.of(jobs, name, "truth")
            return 0.0, spread(self._truth)
        own = self.of(jobs, name)
        # np.max keeps a NaN of weights that exploded; max() may drop it.
        return float(np.max([_distance(*pair) for pair in zip(own, self._truth, strict=True)])), spread(own)


def spread(ways: list[Way]) -> float:
    """Return the largest distance of a rank's way from that of rank 0."""
    return float(np.max([_distance(way, ways[0]) for way in ways]))


def _distance(way: Way, other: Way) -> float:
    """Return the distance between two ways, relative to `other`."""
    return float(np.linalg.norm(way - other) / np.linalg.norm(other))
