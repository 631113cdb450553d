"""Agreement on what every rank is ready to do, and in which order all of them do it.

The ranks form a tree. A rank reports an operation to its parent when its own program and all of its children have
reported it; the root, when it is ready everywhere, sends the order to run it down the tree::

    rank 3 ─ready a─▶ rank 1 ─ready a─▶ rank 0 ─run a─▶ rank 1 ─run a─▶ rank 3

An operation needs everybody, so a rank that has submitted nothing has nothing to hear: letters wait until it joins in,
and no rank ever has to poll while its program computes. Each rank sends one letter up and one to each child for a batch
of operations, whatever the number of ranks. (Horovod's coordinator, arXiv:1802.05799, gathers from all ranks at once.)

What has been agreed once is known by a small number from then on, so that the same batch as last time is a letter of 25
bytes, however many operations it has: all ranks receive the same plans in the same order, and number what they see in
them alike (`Cache`).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from hvdlite.disagreement import deadlock_text, mismatch_text, name_of
from hvdlite.errors import HvdliteError, MismatchError
from hvdlite.letters import (
    NEXT_GROUP,
    PLAN,
    PLAN_LETTER,
    PLAN_ONE,
    PLAN_ONE_LETTER,
    READY,
    READY_LETTER,
    READY_ONE,
    READY_ONE_LETTER,
    RUN,
    Cache,
    Key,
    Report,
    encode,
)
from hvdlite.operations import Signature
from hvdlite.protocols import Transport

FANOUT = 8
"""Children of a rank. Few enough that no rank has much to read, many enough that the tree is flat."""

CACHE_ENTRIES = 2**14
"""What a cache holds before it starts anew: enough for the names of any model, and ids that fit in 16 bits."""


class Decision(NamedTuple):
    """Operations that all ranks treat alike, at the same point of their sequence."""

    keys: tuple[Key, ...]
    error: str | None
    """None: run them as one. Otherwise every rank that has submitted one fails it with this text."""


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
        self._cache = Cache()
        self._blocked: dict[int, tuple[int, dict[int, list[tuple[Key, Signature]]]]] = {}
        self._told_blocked = False
        # A child's letter may be older than our latest plans. This is what it needs to be understood nevertheless.
        self._heard = dict.fromkeys(self._children, 0)  # plans that each child had received when it last reported
        self._retired: list[tuple[int, Cache]] = []  # caches, and the plan that ended each
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
                if kind in (PLAN_ONE_LETTER, PLAN_LETTER):
                    decisions += self._receive_plan(letter)
                    break  # to be carried out before we read on: the others wait for us in it
                if kind in (READY_ONE_LETTER, READY_LETTER):
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
        runs = encode(places)
        letter = READY.pack(READY_LETTER, self._plans, len(runs) // RUN.size) + runs
        self._transport.post(letter + pickle.dumps(rest) if rest else letter, self._parent)
        return []

    def _pass_on_one(self, key: Key, place: tuple[int, int]) -> list[Decision]:
        if self._parent is not None:
            self._transport.post(READY_ONE.pack(READY_ONE_LETTER, self._plans, *place), self._parent)
            return []
        letter = PLAN_ONE.pack(PLAN_ONE_LETTER, *place)
        for child in self._children:
            self._transport.post(letter, child)
        return self._follow([Decision((key,), None)], [])

    # Counting up the tree

    def _receive_ready(self, sender: int, letter: bytes) -> None:
        runs: Iterable[tuple[int, ...]]
        rest = b""
        if letter[0] == READY_ONE_LETTER:
            _, plans, number, identity = READY_ONE.unpack(letter)
            runs = ((number, identity, 1),)
        else:
            _, plans, count = READY.unpack_from(letter)
            end = READY.size + count * RUN.size
            runs, rest = RUN.iter_unpack(letter[READY.size : end]), letter[end:]
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
                encoded.append(encode([known[key] for key in decision.keys]))
                groups.append(decision)
            else:
                rest.append(decision)
        runs = NEXT_GROUP.join(encoded)
        letter = PLAN.pack(PLAN_LETTER, len(runs) // RUN.size) + runs
        if rest:
            letter += pickle.dumps([tuple(decision) for decision in rest])
        for child in self._children:
            self._transport.post(letter, child)
        return self._follow(groups, rest)

    def _receive_plan(self, letter: bytes) -> list[Decision]:
        for child in self._children:
            self._transport.post(letter, child)
        if letter[0] == PLAN_ONE_LETTER:
            _, number, identity = PLAN_ONE.unpack(letter)
            key = self._cache.key(number, identity)
            return self._follow([Decision((key,), None)], [])
        _, count = PLAN.unpack_from(letter)
        end = PLAN.size + count * RUN.size
        runs: list[list[tuple[int, ...]]] = [[]] if count else []
        for run in RUN.iter_unpack(letter[PLAN.size : end]):
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
            self._cache = Cache()
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
