"""The trainings that a program has not finished. They are finished when this rank leaves the job."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

from hvdlite.world import World

_unfinished: WeakKeyDictionary[World, list[Callable[[], None]]] = WeakKeyDictionary()
"""For each world (tests have several), how to finish each training, in the order in which they began."""


def note(world: World, finish: Callable[[], None]) -> None:
    """Note that a training has begun. All its ranks call this."""
    _unfinished.setdefault(world, []).append(finish)


def forget(world: World, finish: Callable[[], None]) -> None:
    """Note that a training is over, or has failed."""
    _unfinished[world].remove(finish)


def finish_all(world: World) -> None:
    """Finish what is not over. This waits until all ranks of each training have come to their end."""
    for finish in list(_unfinished.get(world, ())):
        finish()
