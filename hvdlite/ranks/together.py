"""`Together`: ranks that agree. If one has a problem, or another value than the rest, all of them raise alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from hvdlite.errors import ArgumentError, HvdliteError, MismatchError, ranks_text

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)


class Failure(NamedTuple):
    """An exception, as other ranks are told of it. Not every exception can be pickled.

    Attributes:
        kind: The name of its class; empty for what is no exception.
        text: Its text.
        is_argument: Whether it is an `ArgumentError`.
    """

    kind: str
    text: str
    is_argument: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        return cls(type(error).__name__, str(error), isinstance(error, ArgumentError))

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.kind else self.text


class Together(NamedTuple):
    """Some ranks of a job, and how they tell each other a value. All of them call the same methods in the same order.

    Attributes:
        ranks: Their numbers in the job, for messages.
        gather: Returns the values of all of them, in the order of `ranks`; None for a rank that has joined.
    """

    ranks: Sequence[int]
    gather: Callable[[Any], list[Any]]

    def raise_if(self, problem: T | None, error: Callable[[dict[int, T]], Exception]) -> None:
        """Raise an error on all ranks if any rank has a problem.

        Args:
            problem: This rank's problem, such as a text; something false if there is none.
            error: Makes the error of the problems, by rank.
        """
        told = zip(self.ranks, self.gather(problem), strict=True)
        if problems := {rank: each for rank, each in told if each}:
            raise error(problems)

    def all_do(self, do: Callable[[], T], error: Callable[[dict[int, Failure]], Exception]) -> list[T]:
        """Call a function on every rank, and return what it returned on each. If it raises on one, all ranks raise.

        Args:
            do: The function. What it returns can be pickled.
            error: Makes the error of the failures, by rank.
        """
        cause: Exception | None = None
        mine: tuple[T | None, Failure | None]
        try:
            mine = (do(), None)
        except Exception as failed:
            cause, mine = failed, (None, Failure.of(failed))
        told = [each or (None, Failure("", "it has called join()")) for each in self.gather(mine)]
        if failures := {rank: each for rank, (_, each) in zip(self.ranks, told, strict=True) if each}:
            raise error(failures) from cause
        return [value for value, _ in told]  # type: ignore[misc]  # each is of its `do`

    def check_same(self, lines: Sequence[str], what: str) -> None:
        """Raise on all ranks if their lines differ.

        Args:
            lines: The descriptions that must be equal.
            what: The subject of the lines, for the error.

        Raises:
            MismatchError: The lines differ; the text shows the first difference.
            HvdliteError: A rank has joined, so it cannot be asked.
        """
        digests = self.gather(hashlib.sha256("\n".join(lines).encode()).hexdigest())
        refuse_joined(f"compared {what}", self.ranks, digests)
        if len(set(digests)) > 1:
            raise MismatchError(f"the ranks do not agree on {what}:\n{self.variants(lines)}")

    def variants(self, lines: Sequence[str]) -> str:
        """Return the first line in which the ranks differ, with each rank's version."""
        return variants_text(self.ranks, self.gather(lines))


def refuse_joined(done: str, ranks: Sequence[int], everybody: Sequence[Any]) -> None:
    """Raise an error if a rank has joined, so that what was gathered from it is None. Every rank calls this.

    Args:
        done: What the other ranks do, as in "used shard=True", for the error.
        ranks: The numbers of the ranks in the job.
        everybody: What was gathered from them.

    Raises:
        HvdliteError: A rank has joined. All ranks that have not joined raise it.
    """
    if absent := absent_ranks(ranks, everybody):
        raise HvdliteError(
            f"{ranks_text(absent)} called join() before the other ranks have {done}, which needs all ranks: do it before any "
            "rank calls join(), or after join() has returned."
        )


def absent_ranks(ranks: Sequence[int], everybody: Sequence[Any]) -> list[int]:
    """Return those of the ranks that have joined, so that None was gathered from them."""
    return [rank for rank, each in zip(ranks, everybody, strict=True) if each is None]


def ranks_by(values: Iterable[tuple[int, H]]) -> dict[H, list[int]]:
    """Return for each different value the ranks that have it. `values` are ranks with their values."""
    found: dict[H, list[int]] = {}
    for rank, value in values:
        found.setdefault(value, []).append(rank)
    return found


def variants_text(ranks: Sequence[int], everybody: Sequence[Sequence[str]]) -> str:
    """Return the first line in which the ranks differ, with each rank's version.

    Args:
        ranks: The numbers of the ranks in the job.
        everybody: For each of these ranks its lines.
    """
    first = next(number for number, said in enumerate(zip(*everybody, strict=False)) if len(set(said)) > 1)
    variants = ranks_by((rank, said[first]) for rank, said in zip(ranks, everybody, strict=True))
    return "\n".join(f"  {ranks_text(who)}: {what}" for what, who in variants.items())
