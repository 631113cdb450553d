"""Agreement on what every rank is ready to do, and in which order all of them do it.

The ranks form a tree. A rank reports an operation to its parent when its own program and all of its children have
reported it; the root, when it is ready everywhere, sends the order to run it down the tree::

    rank 3 ─ready a─▶ rank 1 ─ready a─▶ rank 0 ─run a─▶ rank 1 ─run a─▶ rank 3

An operation needs everybody, so a rank that has submitted nothing has nothing to hear: letters wait until it joins in,
and no rank ever has to poll while its program computes. Each rank sends one letter up and one to each child for a batch
of operations, whatever the number of ranks. (Horovod's coordinator, arXiv:1802.05799, gathers from all ranks at once.)
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from hvdlite.errors import HvdliteError, MismatchError
from hvdlite.operations import Signature, describe
from hvdlite.protocols import Transport

Key = str | int
"""An operation's name, or its number in the sequence of unnamed ones."""

FANOUT = 8
"""Children of a rank. Few enough that no rank has much to read, many enough that the tree is flat."""


class Decision(NamedTuple):
    """Operations that all ranks treat alike, at the same point of their sequence."""

    keys: tuple[Key, ...]
    error: str | None
    """None: run them as one. Otherwise every rank that has submitted one fails it with this text."""


class _Tally:
    """Who has reported an operation, and with what signature."""

    __slots__ = ("parties", "variants")

    def __init__(self) -> None:
        self.parties = 0
        self.variants: dict[Signature, list[int]] = {}


class Controller:
    """One rank's part in the agreement. Not thread-safe: its engine calls it under a lock.

    Args:
        transport: Carries the letters; nobody else may post on it.
        fuse: Splits keys that are ready into groups to run as one. Only the root's is asked.
        fanout: Children of each rank.
    """

    def __init__(
        self, transport: Transport, fuse: Callable[[Sequence[Key]], Iterable[Sequence[Key]]], fanout: int = FANOUT
    ) -> None:
        self._transport = transport
        self._fuse = fuse
        self._fanout = fanout
        rank, size = transport.rank, transport.size
        self._rank = rank
        self._parent = (rank - 1) // fanout if rank else None
        self._children = [child for child in range(rank * fanout + 1, rank * fanout + fanout + 1) if child < size]
        self._parties = 1 + len(self._children)
        self._tallies: dict[Key, _Tally] = {}
        self._complete: list[Key] = []
        self._plans = 0  # plans made (root) or received
        self._blocked: dict[int, tuple[int, dict[int, list[tuple[Key, Signature]]]]] = {}
        self._told_blocked = False

    def announce(self, key: Key, signature: Signature) -> None:
        """This rank's program has submitted `key`."""
        self._count(key, {signature: [self._rank]})
        self._wake(self._rank)

    def report_blocked(self, pending: Sequence[tuple[Key, Signature]]) -> None:
        """This rank's program cannot go on before one of `pending` is done. Holds until the next plan or `announce`."""
        if self._rank not in self._blocked:
            self._note_blocked(self._rank, self._plans, {self._rank: list(pending)})

    def step(self) -> list[Decision]:
        """Read the letters that have arrived, pass on what they complete, and return what is now decided, in order."""
        decisions = self._pass_on()  # first, for the others may be waiting for it
        if self._transport.size > 1:
            while (received := self._transport.poll()) is not None:
                sender, letter = received
                kind, *content = pickle.loads(letter)
                if kind == "plan":
                    decisions += self._receive_plan(content[0], letter)
                elif kind == "ready":
                    for key, variants in content[0]:
                        self._count(key, {s: self._subtree(sender) if r is None else r for s, r in variants})
                    self._wake(sender)
                elif kind == "blocked":
                    self._note_blocked(sender, *content)
                else:
                    self._wake(sender)
            decisions += self._pass_on()
        if self._parent is None and (deadlock := self._find_deadlock()) is not None:
            decisions += self._send_plan([deadlock])
        return decisions

    def _pass_on(self) -> list[Decision]:
        """Report what is complete below here; at the root, decide it."""
        if not self._complete:
            return []
        keys, self._complete = self._complete, []
        if self._parent is None:
            return self._send_plan(self._decide(keys))
        self._send(self._parent, "ready", [(key, self._pack(self._tallies.pop(key))) for key in keys])
        return []

    # Counting up the tree

    def _count(self, key: Key, variants: Mapping[Signature, list[int]]) -> None:
        tally = self._tallies.get(key)
        if tally is None:
            tally = self._tallies[key] = _Tally()
        for signature, ranks in variants.items():
            tally.variants.setdefault(signature, []).extend(ranks)
        tally.parties += 1
        if tally.parties == self._parties:
            self._complete.append(key)

    @staticmethod
    def _pack(tally: _Tally) -> list[tuple[Signature, list[int] | None]]:
        if len(tally.variants) == 1:  # no need to list ranks that agree
            return [(signature, None) for signature in tally.variants]
        return list(tally.variants.items())

    def _subtree(self, rank: int) -> list[int]:
        ranks, row = [], [rank]
        while row:
            ranks += row
            row = [
                child
                for parent in row
                for child in range(parent * self._fanout + 1, parent * self._fanout + self._fanout + 1)
                if child < self._transport.size
            ]
        return ranks

    # Deciding at the root, and down again

    def _decide(self, keys: Sequence[Key]) -> list[Decision]:
        decisions, agreed = [], []
        for key in keys:
            variants = self._tallies.pop(key).variants
            if len(variants) == 1:
                agreed.append(key)
            else:
                decisions.append(Decision((key,), mismatch_text(key, variants)))
        return [Decision(tuple(group), None) for group in self._fuse(agreed)] + decisions

    def _send_plan(self, decisions: list[Decision]) -> list[Decision]:
        letter = pickle.dumps(("plan", [tuple(each) for each in decisions])) if self._children else b""
        return self._receive_plan(decisions, letter)

    def _receive_plan(self, plan: Sequence[tuple[tuple[Key, ...], str | None]], letter: bytes) -> list[Decision]:
        for child in self._children:
            self._transport.post(letter, child)
        self._plans += 1
        self._blocked.clear()
        self._told_blocked = False
        decisions = [Decision(*decision) for decision in plan]
        for decision in decisions:
            if decision.error is not None:
                for key in decision.keys:
                    self._tallies.pop(key, None)
        return decisions

    # Ranks that all wait, each for something that another has not submitted

    def _note_blocked(self, party: int, plans: int, pending: dict[int, list[tuple[Key, Signature]]]) -> None:
        self._blocked[party] = (plans, pending)
        if self._parent is not None and self._everybody_blocked():
            self._told_blocked = True
            self._send(self._parent, "blocked", self._plans, self._all_pending())

    def _wake(self, party: int) -> None:
        self._blocked.pop(party, None)
        if self._told_blocked:
            self._told_blocked = False
            assert self._parent is not None
            self._send(self._parent, "awake")

    def _everybody_blocked(self) -> bool:
        # A report from before the latest plan is out of date: the plan may have let that rank go on.
        current = [party for party, (plans, _) in self._blocked.items() if plans == self._plans]
        return len(current) == self._parties

    def _all_pending(self) -> dict[int, list[tuple[Key, Signature]]]:
        return {rank: keys for _, pending in self._blocked.values() for rank, keys in pending.items()}

    def _find_deadlock(self) -> Decision | None:
        if not self._blocked or not self._everybody_blocked():
            return None
        pending = self._all_pending()
        keys = dict.fromkeys(key for waiting in pending.values() for key, _ in waiting)
        return Decision(tuple(keys), deadlock_text(pending))

    def _send(self, dest: int, *content: object) -> None:
        self._transport.post(pickle.dumps(content), dest)


def error_of(decision: Decision) -> HvdliteError:
    """The exception that a failed decision raises: a new one for each caller, with the same text."""
    return MismatchError(decision.error)


def name_of(key: Key) -> str:
    """The key as messages show it."""
    return repr(key) if isinstance(key, str) else f"unnamed operation {key}"


def mismatch_text(key: Key, variants: Mapping[Signature, Sequence[int]]) -> str:
    """Who submitted what under one key."""
    ordered = sorted(variants.items(), key=lambda variant: min(variant[1]))
    first = _first_difference([signature for signature, _ in ordered])
    lines = [f"  {ranks_text(ranks)}: {describe(signature, first)}" for signature, ranks in ordered]
    return f"the ranks do not agree on {name_of(key)}:\n" + "\n".join(lines)


def _first_difference(signatures: Sequence[Signature]) -> int:
    """The number of the first tensor that is not the same in all signatures."""
    tensors = [signature[1] for signature in signatures]
    shortest = min(map(len, tensors))
    return next((n for n in range(shortest) if len({each[n] for each in tensors}) > 1), shortest)


def deadlock_text(pending: Mapping[int, Sequence[tuple[Key, Signature]]]) -> str:
    """Who waits for what."""
    lines = []
    for rank in sorted(pending):
        waiting = [f"{name_of(key)} {describe(signature)}" for key, signature in pending[rank][:3]]
        more = f" and {len(pending[rank]) - 3} more" if len(pending[rank]) > 3 else ""
        lines.append(f"  rank {rank} waits for {', '.join(waiting)}{more}")
    return "every rank waits for an operation that another rank has not submitted, so none can go on:\n" + "\n".join(
        lines
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"
