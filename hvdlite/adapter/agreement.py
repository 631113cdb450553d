"""How the ranks of a process set agree: see `hvdlite.ranks.together`."""

from __future__ import annotations

import functools
from typing import Any

from hvdlite.api import allgather_object, world
from hvdlite.ranks.process_set import ProcessSet
from hvdlite.ranks.together import Together, refuse_joined


def together(process_set: ProcessSet | None) -> Together:
    """Return the ranks of a process set (all ranks if None)."""
    return Together(
        world("allgather_object()").ranks(process_set), functools.partial(allgather_object, process_set=process_set)
    )


def all_together(what: str, process_set: ProcessSet | None) -> Together:
    """Return the ranks of a process set; what they tell each other raises an error if a rank has joined.

    Args:
        what: What they agree on, such as "local_steps=", for the error.
        process_set: The ranks that take part; all if None.
    """
    ranks = world(what).ranks(process_set)

    def gather(value: Any) -> list[Any]:
        everybody = allgather_object((value,), f"{what} of an optimizer", process_set=process_set)
        refuse_joined(f"used {what}", ranks, everybody)
        return [each for (each,) in everybody]

    return Together(ranks, gather)
