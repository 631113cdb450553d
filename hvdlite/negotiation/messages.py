"""What the ranks write to each other about operations: small numbers for what all of them have seen before."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from hvdlite.operations import Signature

Key = str | int
"""An operation's name, or its number in the sequence of unnamed ones."""

JOIN = -1
"""What a rank that has joined waits for. No operation: it is never reported, and runs nowhere."""

Report: TypeAlias = Signature | dict[Signature, list[int]]
"""What a subtree says of an operation: its signature on all of its ranks; or, where they differ or some of them have joined
without submitting it, the ranks of each signature."""

# Messages begin with one of these bytes, or with pickle's own, which is 0x80.
READY_KIND = 1
PLAN_KIND = 2
READY_ONE_KIND = 3
PLAN_ONE_KIND = 4
READY = struct.Struct("<BQI")
"""Kind, plans that the sender has received, runs that follow; after them what had to be pickled."""
PLAN = struct.Struct("<BI")
"""Kind, runs that follow; after them what had to be pickled."""
RUN = struct.Struct("<qHH")
"""Operations with ids that the receiver knows: (-1, id, n) is ids id … id + n - 1, which are names; (number, id, n) is
unnamed operations number … number + n - 1, each with the signature of that id. n = 0 stands between groups of a plan."""
LONGEST_RUN = 2**16 - 1
NEXT_GROUP = RUN.pack(0, 0, 0)
# A blocking call makes messages of one operation with an id, so these are as plain as can be.
READY_ONE = struct.Struct("<BQqH")
"""Kind, plans that the sender has received, number or -1, id."""
PLAN_ONE = struct.Struct("<BqH")
"""Kind, number or -1, id."""


class Cache:
    """The ids of what has been agreed on: (name, signature), or (None, signature) for unnamed operations.

    The id says the signature too, so a rank whose signature differs from the one that was agreed before uses another id, or
    none.
    """

    __slots__ = ("entries", "ids")

    def __init__(self) -> None:
        self.entries: list[tuple[str | None, Signature]] = []
        self.ids: dict[tuple[str | None, Signature], int] = {}

    def place(self, key: Key, signature: Signature) -> tuple[int, int] | None:
        """The operation as the start of a run, or None if it has no id."""
        named = isinstance(key, str)
        number = self.ids.get((key if named else None, signature))  # type: ignore[arg-type]
        return None if number is None else (-1 if named else key, number)  # type: ignore[return-value]

    def key(self, number: int, identity: int) -> Key:
        """The operation that stands at a place."""
        return self.entries[identity][0] if number < 0 else number  # type: ignore[return-value]

    def expand(self, runs: Iterable[tuple[int, ...]]) -> list[tuple[Key, Signature]]:
        """The operations that runs stand for, in order."""
        operations: list[tuple[Key, Signature]] = []
        for number, first, length in runs:
            if number < 0:
                operations += self.entries[first : first + length]  # type: ignore[arg-type]
            else:
                signature = self.entries[first][1]
                operations += [(key, signature) for key in range(number, number + length)]
        return operations


def encode(places: list[tuple[int, int]]) -> bytes:
    """Places in ascending order as runs."""
    if len(places) == 1:
        return RUN.pack(*places[0], 1)
    runs: list[list[int]] = []
    for number, identity in places:
        if runs:
            start, first, length = runs[-1]
            follows = (-1, first + length) if start < 0 else (start + length, first)
            if follows == (number, identity) and length < LONGEST_RUN:
                runs[-1][2] += 1
                continue
        runs.append([number, identity, 1])
    return b"".join([RUN.pack(*run) for run in runs])


class Decision(NamedTuple):
    """Operations that all ranks treat alike, at the same point of their sequence."""

    keys: tuple[Key, ...]
    error: str | None
    """None: run them as one. Otherwise every rank that has submitted one fails it with this text."""
    last_joined: int | None = None
    """Not None: all ranks have joined, this one last. There are no keys then."""


def encode_ready(plans: int, places: list[tuple[int, int]], rest: Sequence[tuple[Key, Report]]) -> bytes:
    """What a rank reports to its parent.

    Args:
        plans: Plans that it has received.
        places: Operations with ids, in ascending order.
        rest: Operations without ids.
    """
    runs = encode(places)
    message = READY.pack(READY_KIND, plans, len(runs) // RUN.size) + runs
    return message + pickle.dumps(rest) if rest else message


def decode_ready(message: bytes) -> tuple[int, Iterable[tuple[int, ...]], list[tuple[Key, Report]]]:
    """The plans, runs and other operations of a report, of either form."""
    if message[0] == READY_ONE_KIND:
        _, plans, number, identity = READY_ONE.unpack(message)
        return plans, ((number, identity, 1),), []
    _, plans, count = READY.unpack_from(message)
    end = READY.size + count * RUN.size
    rest = pickle.loads(message[end:]) if end < len(message) else []
    return plans, RUN.iter_unpack(message[READY.size : end]), rest


def encode_plan(
    decisions: Sequence[Decision], known: Mapping[Key, tuple[int, int]], signatures: Mapping[Key, Signature]
) -> tuple[bytes, list[Decision], list[Decision]]:
    """A plan as the root sends it.

    Args:
        decisions: What was decided.
        known: The places of operations with ids.
        signatures: At least of what some ranks have not submitted.

    Returns:
        The message, the decisions that are in it by ids, and those that are in it by names: all ranks carry them out in
        this order.
    """
    groups, rest, encoded = [], [], []
    for decision in decisions:
        if decision.keys and decision.error is None and all(key in known for key in decision.keys):
            encoded.append(encode([known[key] for key in decision.keys]))
            groups.append(decision)
        else:
            rest.append(decision)
    runs = NEXT_GROUP.join(encoded)
    message = PLAN.pack(PLAN_KIND, len(runs) // RUN.size) + runs
    if rest:
        told = {key: signatures[key] for decision in rest for key in decision.keys if key in signatures}
        message += pickle.dumps(([tuple(decision) for decision in rest], told))
    return message, groups, rest


def decode_plan(
    message: bytes, cache: Cache
) -> tuple[list[list[tuple[Key, Signature]]], list[Decision], dict[Key, Signature]]:
    """The groups of a plan that were sent by ids, the decisions that were sent by names, and the signatures that came along."""
    _, count = PLAN.unpack_from(message)
    end = PLAN.size + count * RUN.size
    runs: list[list[tuple[int, ...]]] = [[]] if count else []
    for run in RUN.iter_unpack(message[PLAN.size : end]):
        if run[2]:
            runs[-1].append(run)
        else:
            runs.append([])
    expanded = [cache.expand(group) for group in runs]
    if end == len(message):
        return expanded, [], {}
    others, signatures = pickle.loads(message[end:])
    return expanded, [Decision(*each) for each in others], signatures
