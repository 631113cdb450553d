"""The control messages about operations. Small numbers stand for operations that all ranks have seen before."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from hvdlite.operations import Signature

Key = str | int
"""An operation's name, or its number in the sequence of unnamed ones."""

JOIN = -1
"""The key for which a rank waits after `join`. It is never reported and never runs."""

Report: TypeAlias = Signature | dict[Signature, list[int]]
"""What a subtree reports of an operation: its signature, if all ranks of the subtree have submitted it alike; else, for each
signature, the ranks that have submitted it."""

# A message begins with one of these bytes, or with 0x80 if it is pickled.
READY_KIND = 1
PLAN_KIND = 2
READY_ONE_KIND = 3
PLAN_ONE_KIND = 4
READY = struct.Struct("<BQI")
"""A report: kind, number of plans that the sender has received, number of runs. The runs follow, then a pickled rest."""
PLAN = struct.Struct("<BI")
"""A plan: kind, number of runs. The runs follow, then a pickled rest."""
RUN = struct.Struct("<qHH")
"""A run of operations with ids that the receiver knows. (-1, id, n) is n named operations with the ids id … id + n - 1.
(number, id, n) is the unnamed operations number … number + n - 1, all with the signature of that id. A run with n = 0 separates
two groups of a plan."""
LONGEST_RUN = 2**16 - 1
NEXT_GROUP = RUN.pack(0, 0, 0)
# A blocking call makes messages of one operation with an id, so these are as plain as can be.
READY_ONE = struct.Struct("<BQqH")
"""A report of one operation: kind, number of plans that the sender has received, number or -1, id."""
PLAN_ONE = struct.Struct("<BqH")
"""A plan of one operation: kind, number or -1, id."""


class Cache:
    """The ids of operations that were agreed on: of (name, signature), or of (None, signature) for unnamed operations.

    An id stands for a signature too. So a rank with a signature other than the agreed one uses another id, or none.
    """

    __slots__ = ("entries", "ids")

    def __init__(self) -> None:
        self.entries: list[tuple[str | None, Signature]] = []
        self.ids: dict[tuple[str | None, Signature], int] = {}

    def run_start(self, key: Key, signature: Signature) -> tuple[int, int] | None:
        """Return (number or -1, id) of an operation, with which a run can start, or None if the operation has no id."""
        named = isinstance(key, str)
        number = self.ids.get((key if named else None, signature))  # type: ignore[arg-type]
        return None if number is None else (-1 if named else key, number)  # type: ignore[return-value]

    def key(self, number: int, identity: int) -> Key:
        """Return the key of the operation with this number (-1 for a named one) and this id."""
        return self.entries[identity][0] if number < 0 else number  # type: ignore[return-value]

    def expand(self, runs: Iterable[tuple[int, ...]]) -> list[tuple[Key, Signature]]:
        """Return the operations of some runs, in order."""
        operations: list[tuple[Key, Signature]] = []
        for number, first, length in runs:
            if number < 0:
                operations += self.entries[first : first + length]  # type: ignore[arg-type]
            else:
                signature = self.entries[first][1]
                operations += [(key, signature) for key in range(number, number + length)]
        return operations


def encode(starts: list[tuple[int, int]]) -> bytes:
    """Encode operations as runs. They are given as pairs (number or -1, id), ascending."""
    if len(starts) == 1:
        return RUN.pack(*starts[0], 1)
    runs: list[list[int]] = []
    for number, identity in starts:
        if runs:
            start, first, length = runs[-1]
            follows = (-1, first + length) if start < 0 else (start + length, first)
            if follows == (number, identity) and length < LONGEST_RUN:
                runs[-1][2] += 1
                continue
        runs.append([number, identity, 1])
    return b"".join([RUN.pack(*run) for run in runs])


class Decision(NamedTuple):
    """Operations that all ranks run, or fail, as one at the same point of their sequence."""

    keys: tuple[Key, ...]
    error: str | None
    """None if the operations run as one. Otherwise each rank that has submitted one of them fails it with this text."""
    last_joined: int | None = None
    """The rank that joined last, if all ranks have joined; then there are no keys. Otherwise None."""


def encode_ready(plans: int, starts: list[tuple[int, int]], rest: Sequence[tuple[Key, Report]]) -> bytes:
    """Encode a report of a rank to its parent.

    Args:
        plans: The number of plans that the rank has received.
        starts: The operations with ids, as pairs (number or -1, id), ascending.
        rest: The operations without ids.
    """
    runs = encode(starts)
    message = READY.pack(READY_KIND, plans, len(runs) // RUN.size) + runs
    return message + pickle.dumps(rest) if rest else message


def decode_ready(message: bytes) -> tuple[int, Iterable[tuple[int, ...]], list[tuple[Key, Report]]]:
    """Decode a report, of either form: the number of plans, the runs, and the operations without ids."""
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
    """Encode a plan, as the root sends it.

    Args:
        decisions: The decisions of the plan.
        known: The operations with ids, each with its pair (number or -1, id).
        signatures: The signatures of the operations, at least of those that some ranks have not submitted.

    Returns:
        The message, the decisions that it has by ids, and the decisions that it has by names. All ranks carry them out in this
        order.
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
    """Decode a plan: the groups that were sent by ids, the decisions that were sent by names, and the signatures sent along."""
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
