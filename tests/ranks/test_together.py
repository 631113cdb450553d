"""Ranks that agree: if one has a problem, or another value, all raise alike."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from hvdlite.ranks.together import Failure, Together, ranks_by

RANKS = (1, 3, 4)


def on_all(do: Callable[[int, Together], Any], joined: int | None = None) -> list[Any]:
    """Call `do` for each of the ranks, in a thread of its own, and return what it returned or raised on each.

    Args:
        do: Gets the index of the rank.
        joined: The index of a rank that has joined, whose value is None.
    """
    meeting, told = threading.Barrier(len(RANKS)), [None] * len(RANKS)
    found: list[Any] = [None] * len(RANKS)

    def run(index: int) -> None:
        def gather(value: Any) -> list[Any]:
            told[index] = None if index == joined else value
            meeting.wait(30)
            everybody = list(told)
            meeting.wait(30)
            return everybody

        try:
            found[index] = do(index, Together(RANKS, gather))
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(RANKS))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return found


def in_words(problems: dict[int, Any]) -> HvdliteError:
    return HvdliteError("; ".join(f"{rank} {problem}" for rank, problem in problems.items()))


def test_all_raise_if_one_has_a_problem() -> None:
    assert on_all(lambda index, ranks: ranks.raise_if("", in_words)) == [None] * 3
    found = on_all(lambda index, ranks: ranks.raise_if("is ill" if index else "", in_words))
    assert [str(each) for each in found] == ["3 is ill; 4 is ill"] * 3
    assert {type(each) for each in found} == {HvdliteError}


def test_all_get_what_each_has_done_or_all_raise() -> None:
    assert on_all(lambda index, ranks: ranks.all_do(lambda: index * index, in_words)) == [[0, 1, 4]] * 3

    def fails(index: int, ranks: Together) -> None:
        def do() -> int:
            if index == 1:
                raise ArgumentError("no")
            return [7, 0, 8][index] // index

        ranks.all_do(do, in_words)

    found = on_all(fails)
    assert [str(each) for each in found] == [
        "1 ZeroDivisionError: integer division or modulo by zero; 3 ArgumentError: no"
    ] * 3
    assert [type(each.__cause__) for each in found] == [ZeroDivisionError, ArgumentError, type(None)]
    found = on_all(lambda index, ranks: ranks.all_do(lambda: index, in_words), joined=2)
    assert str(found[0]) == "4 it has called join()"


def test_lines_are_the_same_or_all_raise_the_first_that_differs() -> None:
    def same(index: int, ranks: Together) -> None:
        ranks.check_same(["op=Sum", f"shard={index == 2}", f"rank={index}"], "what they are given")

    found = on_all(same)
    expected = "the ranks do not agree on what they are given:\n  ranks 1, 3: shard=False\n  rank 4: shard=True"
    assert [str(each) for each in found] == [expected] * 3
    assert {type(each) for each in found} == {MismatchError}
    assert on_all(lambda index, ranks: ranks.check_same(["op=Sum"], "what they are given")) == [None] * 3
    found = on_all(lambda index, ranks: ranks.check_same(["op=Sum"], "what they are given"), joined=0)
    assert str(found[1]).startswith("rank 1 called join() before the other ranks have compared what they are given")


@pytest.mark.parametrize(
    ("error", "text", "is_argument"),
    [(ArgumentError("no"), "ArgumentError: no", True), (OSError("full"), "OSError: full", False)],
)
def test_a_failure_has_the_words_of_its_error(error: Exception, text: str, is_argument: bool) -> None:
    failure = Failure.of(error)
    assert (str(failure), failure.is_argument) == (text, is_argument)


def test_ranks_by_value() -> None:
    assert ranks_by([(0, "a"), (1, "b"), (2, "a")]) == {"a": [0, 2], "b": [1]}
