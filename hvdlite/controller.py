"""Agreement on what every rank is ready to do, and in which order all of them do it.

The ranks form a tree. A rank reports an operation to its parent when its own program and all of its children have
reported it; the root, when it is ready everywhere, sends the order to run it down the tree::

    rank 3 ─ready a─▶ rank 1 ─ready a─▶ rank 0 ─run a─▶ rank 1 ─run a─▶ rank 3

An operation needs everybody, so a rank that has submitted nothing has nothing to hear: letters wait until it joins in,
and no rank ever has to poll while its program computes. Each rank sends one letter up and one to each child for a batch
of operations, whatever the number of ranks. (Horovod's coordinator, arXiv:1802.05799, gathers from all ranks at once.)

What has been agreed once is known by a small number from then on, so that the same batch as last time is a letter of 25
bytes, however many operations it has: all ranks receive the same plans in the same order, and number what they see in
them alike (`_Cache`).
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from hvdlite.errors import HvdliteError, MismatchError
from hvdlite.operations import Signature, describe
from hvdlite.protocols import Transport

Key = str | int
"""An operation's name, or its number in the sequence of unnamed ones."""

FANOUT = 8
"""Children of a rank. Few enough that no rank has much to read, many enough that the tree is flat."""

CACHE_ENTRIES = 2**14
"""What a cache holds before it starts anew: enough for the names of any model, and ids that fit in 16 bits."""

Report: TypeAlias = Signature | dict[Signature, list[int]]
"""What a subtree says of an operation: the signature on all of its ranks or, where they differ, the ranks of each."""

# Letters begin with one of these bytes, or with pickle's own, which is 0x80.
_READY_LETTER = 1
_PLAN_LETTER = 2
_READY_ONE_LETTER = 3
_PLAN_ONE_LETTER = 4
_READY = struct.Struct("<BQI")
"""Kind, plans that the sender has received, runs that follow; after them what had to be pickled."""
_PLAN = struct.Struct("<BI")
"""Kind, runs that follow; after them what had to be pickled."""
_RUN = struct.Struct("<qHH")
"""Operations with ids that the receiver knows: (-1, id, n) is ids id … id + n - 1, which are names; (number, id, n) is
unnamed operations number … number + n - 1, each with the signature of that id. n = 0 stands between groups of a plan."""
_LONGEST_RUN = 2**16 - 1
_NEXT_GROUP = _RUN.pack(0, 0, 0)
# A blocking call makes letters of one operation with an id, so these are as plain as can be.
_READY_ONE = struct.Struct("<BQqH")
"""Kind, plans that the sender has received, number or -1, id."""
_PLAN_ONE = struct.Struct("<BqH")
"""Kind, number or -1, id."""


class Decision(NamedTuple):
    """Operations that all ranks treat alike, at the same point of their sequence."""

    keys: tuple[Key, ...]
    error: str | None
    """None: run them as one. Otherwise every rank that has submitted one fails it with this text."""


class _Cache:
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

    def expand(self, runs: Iterable[tuple[int, ...]]) -> list[tuple[Key, Report]]:
        """The operations that runs stand for, in order."""
        operations: list[tuple[Key, Report]] = []
        for number, first, length in runs:
            if number < 0:
                operations += self.entries[first : first + length]  # type: ignore[arg-type]
            else:
                signature = self.entries[first][1]
                operations += [(key, signature) for key in range(number, number + length)]
        return operations


def _encode(places: list[tuple[int, int]]) -> bytes:
    """Places in ascending order as runs."""
    if len(places) == 1:
        return _RUN.pack(*places[0], 1)
    runs: list[list[int]] = []
    for number, identity in places:
        if runs:
            start, first, length = runs[-1]
            follows = (-1, first + length) if start < 0 else (start + length, first)
            if follows == (number, identity) and length < _LONGEST_RUN:
                runs[-1][2] += 1
                continue
        runs.append([number, identity, 1])
    return b"".join([_RUN.pack(*run) for run in runs])


class _Tally:
    """Who has reported an operation, and what."""

    __slots__ = ("agreed", "first", "reports")

    def __init__(self, first: Report) -> None:
        self.first = first
        self.agreed = not isinstance(first, dict)
        self.reports: list[tuple[int, Report]] = []


class Controller:
    """One rank's part in the agreement. Not thread-safe: its engine calls it under a lock.

    Args:
        transport: Carries the letters; nobody else may post on it.
        fuse: Splits keys that are ready into groups to run as one. Only the root's is asked.
        fanout: Children of each rank.
        cache_entries: How many ids there are, at most 65536. The same on every rank.
    """

    def __init__(
        self,
        transport: Transport,
        fuse: Callable[[Sequence[Key]], Iterable[Sequence[Key]]],
        fanout: int = FANOUT,
        cache_entries: int = CACHE_ENTRIES,
    ) -> None:
        self._transport = transport
        self._fuse = fuse
        self._fanout = fanout
        self._cache_entries = cache_entries
        rank, size = transport.rank, transport.size
        self._rank = rank
        self._parent = (rank - 1) // fanout if rank else None
        self._children = [child for child in range(rank * fanout + 1, rank * fanout + fanout + 1) if child < size]
        self._parties = 1 + len(self._children)
        self._announced: dict[Key, Signature] = {}
        self._tallies: dict[Key, _Tally] = {}
        self._complete: dict[Key, Report] = {}
        self._plans = 0  # plans made (root) or received
        self._cache = _Cache()
        self._blocked: dict[int, tuple[int, dict[int, list[tuple[Key, Signature]]]]] = {}
        self._told_blocked = False
        # A child's letter may be older than our latest plans. This is what it needs to be understood nevertheless.
        self._heard = dict.fromkeys(self._children, 0)  # plans that each child had received when it last reported
        self._retired: list[tuple[int, _Cache]] = []  # caches, and the plan that ended each
        self._failed: dict[Key, int] = {}  # operations failed before everybody had reported them, and the plan that did

    def announce(self, key: Key, signature: Signature) -> None:
        """This rank's program has submitted `key`."""
        self._announced[key] = signature
        self._count(key, signature, self._rank)
        if self._blocked:
            self._wake(self._rank)

    def report_blocked(self, pending: Sequence[tuple[Key, Signature]]) -> None:
        """This rank's program cannot go on before one of `pending` is done. Holds until the next plan or `announce`."""
        if self._rank not in self._blocked:
            self._note_blocked(self._rank, self._plans, {self._rank: list(pending)})

    def step(self) -> list[Decision]:
        """Read the letters that have arrived, pass on what they complete, and return what is now decided, in order."""
        decisions = self._pass_on() if self._complete else []  # first, for the others may be waiting for it
        if self._parties > 1 or self._parent is not None:
            while (received := self._transport.poll()) is not None:
                sender, letter = received
                kind = letter[0]
                if kind in (_PLAN_ONE_LETTER, _PLAN_LETTER):
                    decisions += self._receive_plan(letter)
                    break  # to be carried out before we read on: the others wait for us in it
                if kind in (_READY_ONE_LETTER, _READY_LETTER):
                    self._receive_ready(sender, letter)
                else:
                    kind, *content = pickle.loads(letter)
                    if kind == "blocked":
                        self._note_blocked(sender, *content)
                    else:
                        self._wake(sender)
            if self._complete:
                decisions += self._pass_on()
        if self._blocked and self._parent is None and (deadlock := self._find_deadlock()) is not None:
            decisions += self._send_plan([deadlock], {})
        return decisions

    def _pass_on(self) -> list[Decision]:
        """Report what is complete below here; at the root, decide it."""
        complete, self._complete = self._complete, {}
        if len(complete) == 1:  # a blocking call: the fewer steps the better
            ((key, report),) = complete.items()
            if not isinstance(report, dict) and (place := self._cache.place(key, report)) is not None:
                return self._pass_on_one(key, place)
        if self._parent is None:
            return self._decide(complete)
        places, rest = [], []
        for key, report in complete.items():
            place = None if isinstance(report, dict) else self._cache.place(key, report)
            if place is None:
                rest.append((key, report))
            else:
                places.append(place)
        places.sort()
        runs = _encode(places)
        letter = _READY.pack(_READY_LETTER, self._plans, len(runs) // _RUN.size) + runs
        self._transport.post(letter + pickle.dumps(rest) if rest else letter, self._parent)
        return []

    def _pass_on_one(self, key: Key, place: tuple[int, int]) -> list[Decision]:
        if self._parent is not None:
            self._transport.post(_READY_ONE.pack(_READY_ONE_LETTER, self._plans, *place), self._parent)
            return []
        letter = _PLAN_ONE.pack(_PLAN_ONE_LETTER, *place)
        for child in self._children:
            self._transport.post(letter, child)
        return self._follow([Decision((key,), None)], [])

    # Counting up the tree

    def _receive_ready(self, sender: int, letter: bytes) -> None:
        runs: Iterable[tuple[int, ...]]
        rest = b""
        if letter[0] == _READY_ONE_LETTER:
            _, plans, number, identity = _READY_ONE.unpack(letter)
            runs = ((number, identity, 1),)
        else:
            _, plans, count = _READY.unpack_from(letter)
            end = _READY.size + count * _RUN.size
            runs, rest = _RUN.iter_unpack(letter[_READY.size : end]), letter[end:]
        self._heard[sender] = plans
        cache = self._cache
        if self._retired:
            cache = next((old for until, old in self._retired if plans < until), cache)
        reports = cache.expand(runs)
        if rest:
            reports += pickle.loads(rest)
        if self._failed:  # the plan that failed them is on its way to the sender, for whom it will do the same
            reports = [(key, report) for key, report in reports if plans >= self._failed.get(key, 0)]
        for key, report in reports:
            self._count(key, report, sender)
        if self._retired or self._failed:
            self._forget()
        if self._blocked:
            self._wake(sender)

    def _forget(self) -> None:
        """Let go of what no letter can refer to any more, because all children have received later plans."""
        oldest = min(self._heard.values(), default=self._plans)
        self._retired = [(until, cache) for until, cache in self._retired if until > oldest]
        self._failed = {key: plan for key, plan in self._failed.items() if plan > oldest}

    def _count(self, key: Key, report: Report, party: int) -> None:
        if self._parties == 1 and not isinstance(report, dict):
            self._complete[key] = report
            return
        tally = self._tallies.get(key)
        if tally is None:
            tally = self._tallies[key] = _Tally(report)
        elif report is not tally.first and report != tally.first:
            tally.agreed = False
        tally.reports.append((party, report))
        if len(tally.reports) == self._parties:
            del self._tallies[key]
            self._complete[key] = tally.first if tally.agreed else self._variants(tally)

    def _variants(self, tally: _Tally) -> dict[Signature, list[int]]:
        variants: dict[Signature, list[int]] = {}
        for party, report in tally.reports:
            if isinstance(report, dict):
                for signature, ranks in report.items():
                    variants.setdefault(signature, []).extend(ranks)
            else:
                variants.setdefault(report, []).extend([party] if party == self._rank else self._subtree(party))
        return variants

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

    def _decide(self, complete: Mapping[Key, Report]) -> list[Decision]:
        known: dict[Key, tuple[int, int]] = {}
        new: list[Key] = []
        mismatches = []
        for key, report in complete.items():
            if isinstance(report, dict):
                mismatches.append(Decision((key,), mismatch_text(key, report)))
            elif (place := self._cache.place(key, report)) is None:
                new.append(key)
            else:
                known[key] = place
        agreed = [*known, *new] if len(known) < 2 else [*sorted(known, key=known.__getitem__), *new]
        return self._send_plan([*(Decision(tuple(group), None) for group in self._fuse(agreed)), *mismatches], known)

    def _send_plan(self, decisions: list[Decision], known: Mapping[Key, tuple[int, int]]) -> list[Decision]:
        """Send a plan and return its decisions in the order in which all ranks carry them out."""
        if not self._children:  # a rank alone, with nobody to write to
            return self._follow(decisions, [])
        groups, rest = [], []
        encoded = []
        for decision in decisions:
            if decision.error is None and all(key in known for key in decision.keys):
                encoded.append(_encode([known[key] for key in decision.keys]))
                groups.append(decision)
            else:
                rest.append(decision)
        runs = _NEXT_GROUP.join(encoded)
        letter = _PLAN.pack(_PLAN_LETTER, len(runs) // _RUN.size) + runs
        if rest:
            letter += pickle.dumps([tuple(decision) for decision in rest])
        for child in self._children:
            self._transport.post(letter, child)
        return self._follow(groups, rest)

    def _receive_plan(self, letter: bytes) -> list[Decision]:
        for child in self._children:
            self._transport.post(letter, child)
        if letter[0] == _PLAN_ONE_LETTER:
            _, number, identity = _PLAN_ONE.unpack(letter)
            key = self._cache.key(number, identity)
            return self._follow([Decision((key,), None)], [])
        _, count = _PLAN.unpack_from(letter)
        end = _PLAN.size + count * _RUN.size
        runs: list[list[tuple[int, ...]]] = [[]] if count else []
        for run in _RUN.iter_unpack(letter[_PLAN.size : end]):
            if run[2]:
                runs[-1].append(run)
            else:
                runs.append([])
        groups = [Decision(tuple([key for key, _ in self._cache.expand(group)]), None) for group in runs]
        rest = [Decision(*each) for each in pickle.loads(letter[end:])] if end < len(letter) else []
        return self._follow(groups, rest)

    def _follow(self, groups: list[Decision], rest: list[Decision]) -> list[Decision]:
        """Enter a plan in the books: its groups were sent by ids, the rest by names."""
        self._plans += 1
        self._blocked.clear()
        self._told_blocked = False
        for decision in groups:
            for key in decision.keys:
                del self._announced[key]
        for decision in rest:
            for key in decision.keys:
                signature = self._announced.pop(key, None)
                if decision.error is None:
                    assert signature is not None, f"a plan has {name_of(key)}, which this rank has not submitted"
                    self._learn(key, signature)
                else:
                    self._tallies.pop(key, None)
                    self._complete.pop(key, None)
                    self._failed[key] = self._plans
        if self._failed or self._retired:
            self._forget()
        return groups + rest

    def _learn(self, key: Key, signature: Signature) -> None:
        """Give what was agreed on an id, the same as on all other ranks."""
        entry = (key if isinstance(key, str) else None, signature)
        if entry in self._cache.ids:
            return
        if len(self._cache.entries) == self._cache_entries:
            self._retired.append((self._plans, self._cache))
            self._cache = _Cache()
        self._cache.ids[entry] = len(self._cache.entries)
        self._cache.entries.append(entry)

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
        if not self._everybody_blocked():
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
