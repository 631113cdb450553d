"""Checks that the ranks are given the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.api import allgather_object, world
from hvdlite.errors import HvdliteError, MismatchError
from hvdlite.negotiation.mismatch import variants_text
from hvdlite.process_set import ProcessSet


def gather_from_all(what: str, process_set: ProcessSet | None) -> Callable[[Any], list[Any]]:
    """Return a function that gathers the objects of all ranks, and raises an error if a rank has joined. Every rank calls it.

    Args:
        what: What it is gathered for, such as "local_steps=", for the error.
        process_set: The ranks that take part; all if None.
    """

    def gather(value: Any) -> list[Any]:
        everybody = allgather_object((value,), f"{what} of an optimizer", process_set=process_set)
        ranks = world(what).ranks(process_set)
        absent = [str(rank) for rank, each in zip(ranks, everybody, strict=True) if each is None]
        if absent:
            raise HvdliteError(
                f"rank{'s' * (len(absent) > 1)} {', '.join(absent)} called join() before the other ranks have used {what}, "
                "which needs all ranks: make the optimizer before that."
            )
        return [each for (each,) in everybody]

    return gather


def check_same(lines: Sequence[str], what: str, ranks: Sequence[int], gather: Callable[[Any], list[Any]]) -> None:
    """Raise on all ranks if their lines differ. Every rank calls this.

    Args:
        lines: The descriptions that must be equal.
        what: The subject of the lines, for the error.
        ranks: The world ranks that take part.
        gather: A function that returns the objects of all ranks as a list, in the order of `ranks`.

    Raises:
        MismatchError: The lines differ; the text shows the first difference.
    """
    if len(set(gather(hashlib.sha256("\n".join(lines).encode()).hexdigest()))) == 1:
        return
    everybody: list[list[str]] = gather(lines)
    text = variants_text(ranks, everybody)
    raise MismatchError(f"the ranks do not agree on {what}:\n{text}")
