"""Checks that the ranks are given the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.api import allgather_object, world
from hvdlite.errors import HvdliteError, MismatchError, ranks_text
from hvdlite.operations.negotiation.mismatch import variants_text
from hvdlite.ranks.process_set import ProcessSet


def gather_from_all(what: str, process_set: ProcessSet | None) -> Callable[[Any], list[Any]]:
    """Return a function that gathers the objects of all ranks, and raises an error if a rank has joined. Every rank calls it.

    Args:
        what: What it is gathered for, such as "local_steps=", for the error.
        process_set: The ranks that take part; all if None.
    """

    def gather(value: Any) -> list[Any]:
        everybody = allgather_object((value,), f"{what} of an optimizer", process_set=process_set)
        refuse_joined(f"used {what}", world(what).ranks(process_set), everybody)
        return [each for (each,) in everybody]

    return gather


def refuse_joined(done: str, ranks: Sequence[int], everybody: Sequence[Any]) -> None:
    """Raise an error if a rank has called `join`, so that what was gathered from it is None. Every rank calls this.

    Args:
        done: What the other ranks do, as in "used shard=True", for the error.
        ranks: The world ranks that take part.
        everybody: What was gathered from them.

    Raises:
        HvdliteError: A rank has joined. All ranks that have not joined raise it.
    """
    absent = [rank for rank, each in zip(ranks, everybody, strict=True) if each is None]
    if absent:
        raise HvdliteError(
            f"{ranks_text(absent)} called join() before the other ranks have {done}, which needs all ranks: do it before any "
            "rank calls join(), or after join() has returned."
        )


def check_same(lines: Sequence[str], what: str, ranks: Sequence[int], gather: Callable[[Any], list[Any]]) -> None:
    """Raise on all ranks if their lines differ. Every rank calls this.

    Args:
        lines: The descriptions that must be equal.
        what: The subject of the lines, for the error.
        ranks: The world ranks that take part.
        gather: A function that returns the objects of all ranks as a list, in the order of `ranks`.

    Raises:
        MismatchError: The lines differ; the text shows the first difference.
        HvdliteError: A rank has joined, so it cannot be asked.
    """
    digests = gather(hashlib.sha256("\n".join(lines).encode()).hexdigest())
    refuse_joined(f"compared {what}", ranks, digests)
    if len(set(digests)) == 1:
        return
    everybody: list[list[str]] = gather(lines)
    text = variants_text(ranks, everybody)
    raise MismatchError(f"the ranks do not agree on {what}:\n{text}")
