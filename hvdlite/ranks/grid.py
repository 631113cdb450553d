"""The geometry of a process grid: which rank has which place, so that the ranks that talk most are on one host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvdlite.errors import ArgumentError
from hvdlite.protocols import Array

_CLOSEST = ("tp", "pp")
"""The axes whose ranks talk most, the first one most: sliced layers in every layer, stages of a pipeline once for each
micro-batch. Replicas (dp) talk once in a step."""


class Grid:
    """The places of all ranks on named axes. The neighbours on the axes of `_CLOSEST`, then on the last axis, share hosts.

    Args:
        axes: The size of each axis by its name, in the order of the program. One of them may be -1: it takes what is left.
        hosts: For each rank of the job, a number of its host.

    Attributes:
        axes: The size of each axis by its name.
        ranks: The rank at each place: int64, of shape ``tuple(axes.values())``.

    Raises:
        ArgumentError: The grid has not as many places as the job has ranks, or a size is not positive.
    """

    def __init__(self, axes: Mapping[str, int], hosts: Sequence[int]) -> None:
        self.axes: dict[str, int] = _checked(axes, len(hosts))
        self._hosts = hosts
        names = list(self.axes)
        inner = [name for name in reversed(_CLOSEST) if name in self.axes]
        outer_to_inner = [name for name in names if name not in inner] + inner
        order: dict[int, None] = dict.fromkeys(hosts)
        by_host = [rank for host in order for rank, other in enumerate(hosts) if other == host]
        laid_out = np.array(by_host).reshape([self.axes[name] for name in outer_to_inner])
        self.ranks: Array = laid_out.transpose([outer_to_inner.index(name) for name in names])

    def lines(self, name: str) -> list[tuple[int, ...]]:
        """Return the ranks of each line along an axis: the ranks that differ in their place on this axis only."""
        along = np.moveaxis(self.ranks, list(self.axes).index(self.check_axis(name)), -1)
        return [tuple(line) for line in along.reshape(-1, self.axes[name]).tolist()]

    def place_of(self, rank: int) -> dict[str, int]:
        """Return the place of a rank on each axis."""
        (place,) = np.argwhere(self.ranks == rank).tolist()
        return dict(zip(self.axes, place, strict=True))

    def check_axis(self, name: Any) -> str:
        """Return the name of an axis.

        Raises:
            ArgumentError: The grid has no such axis.
        """
        if name not in self.axes:
            raise ArgumentError(f"{name!r} is no axis of this grid; it has {', '.join(self.axes)}.")
        return str(name)

    def within_hosts(self, name: str) -> bool:
        """Return whether the ranks of each line along an axis share a host."""
        return all(len({self._hosts[rank] for rank in line}) == 1 for line in self.lines(name))

    def __repr__(self) -> str:
        return f"ProcessGrid({', '.join(f'{name}={size}' for name, size in self.axes.items())})"

    def __str__(self) -> str:
        """Return a picture: a row for each line along the last axis, with the places on the other axes before it."""
        *others, last = self.axes
        hosts = list(dict.fromkeys(self._hosts))
        digits = max(len(f"{last} {self.axes[last] - 1}"), len(str(len(self._hosts) - 1)))
        head = [" " * len(f"{name} {size - 1}") for name, size in list(self.axes.items())[:-1]]
        columns = [f"{last} {place}".rjust(digits) for place in range(self.axes[last])]
        lines = [
            f"{self!r}: {len(self._hosts)} rank{'s' * (len(self._hosts) > 1)} on {len(hosts)} host{'s' * (len(hosts) > 1)}"
        ]
        lines.append("  " + "  ".join([*head, *columns]).rstrip())
        for place in np.ndindex(self.ranks.shape[:-1]):
            line = self.ranks[place].tolist()
            named = [
                f"{name} {number}".ljust(len(blank)) for name, number, blank in zip(others, place, head, strict=True)
            ]
            there = sorted({hosts.index(self._hosts[rank]) for rank in line})
            where = f"  host {', '.join(map(str, there))}" if len(hosts) > 1 else ""
            lines.append("  " + "  ".join([*named, *(str(rank).rjust(digits) for rank in line)]) + where)
        if len(hosts) > 1:
            inside = [name for name in self.axes if self.within_hosts(name)]
            between = [name for name in self.axes if name not in inside]
            said = [
                f"{', '.join(names)} {how}"
                for names, how in ((inside, "within hosts"), (between, "between hosts"))
                if names
            ]
            lines.append(f"  {'; '.join(said)}")
        return "\n".join(lines)


def _checked(axes: Mapping[str, int], ranks: int) -> dict[str, int]:
    asked = ", ".join(f"{name}={size!r}" for name, size in axes.items())
    for name, size in axes.items():
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise ArgumentError(
                f"ProcessGrid({asked}): {name} must be a number of ranks from 1 on, or -1 for what is left."
            )
    sizes = dict(axes)
    open_axes = [name for name, size in axes.items() if size == -1]
    known = math.prod(size for size in axes.values() if size != -1)
    if len(open_axes) == 1 and ranks % known == 0:
        sizes[open_axes[0]] = ranks // known
    elif not axes or open_axes or known != ranks:
        product = " × ".join("?" if size == -1 else str(size) for size in axes.values()) or "no axis"
        raise ArgumentError(
            f"ProcessGrid({asked}): {product}{'' if open_axes or not axes else f' = {known} places'}, and the job has {ranks} "
            f"rank{'s' * (ranks > 1)}. The product of the axes must be the number of ranks: start the job with "
            f"hvdliterun -np {known}{' (or a multiple)' if open_axes else ''}, or change an axis. One axis may be -1: it takes "
            "what is left."
        )
    return sizes
