"""Agreement on what every rank is ready to do, and in which order all of them do it.

The ranks form a tree. A rank reports an operation to its parent when its own program and all of its children have
reported it; the root, when it is ready everywhere, sends the order to run it down the tree::

    rank 3 ─ready a─▶ rank 1 ─ready a─▶ rank 0 ─run a─▶ rank 1 ─run a─▶ rank 3

An operation needs everybody, so a rank that has submitted nothing has nothing to hear: messages wait until it joins in,
and no rank ever has to poll while its program computes. Each rank sends one message up and one to each child for a batch
of operations, whatever the number of ranks. (Horovod's coordinator, arXiv:1802.05799, gathers from all ranks at once.)

What has been agreed once is known by a small number from then on, so that the same batch as last time is a message of 25
bytes, however many operations it has: all ranks receive the same plans in the same order, and number what they see in
them alike (`Cache`).

A rank that has joined counts as having reported everything (`ReadyTable`). It learns what it takes part in from the plan,
which it understands as the others do: by the ids, or by the signatures that come with new names.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence

from hvdlite.errors import HvdliteError, MismatchError
from hvdlite.negotiation.blocked import BlockedParties
from hvdlite.negotiation.history import History
from hvdlite.negotiation.messages import (
    JOIN,
    PLAN_KIND,
    PLAN_ONE,
    PLAN_ONE_KIND,
    READY_KIND,
    READY_ONE,
    READY_ONE_KIND,
    Cache,
    Decision,
    Key,
    Report,
    decode_plan,
    decode_ready,
    encode_plan,
    encode_ready,
)
from hvdlite.negotiation.mismatch import deadlock_text, name_of, why_not_done
from hvdlite.negotiation.readiness import ReadyTable
from hvdlite.operations import Signature
from hvdlite.protocols import Transport

FANOUT = 8
"""Children of a rank. Few enough that no rank has much to read, many enough that the tree is flat."""

CACHE_ENTRIES = 2**14
"""What a cache holds before it starts anew: enough for the names of any model, and ids that fit in 16 bits."""


class Controller:
    """One rank's part in the agreement. Not thread-safe: its engine calls it under a lock.

    Args:
        transport: Carries the messages; nobody else may post on it.
        fuse: Splits keys that are ready into groups to run as one. Only the root's is asked.
        fanout: Children of each rank.
        cache_entries: How many ids there are, at most 65536. The same on every rank.

    Attributes:
        unsubmitted: Operations that a plan (or, on the root, the plan in the making) has for this rank, which has joined and
            not submitted them. For the engine to take out.
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
        rank, size = transport.rank, transport.size
        self._rank = rank
        self._parent = (rank - 1) // fanout if rank else None
        self._tallies = ReadyTable(rank, size, fanout)
        self._children = self._tallies.children
        self._parties = 1 + len(self._children)
        self._announced: dict[Key, Signature] = {}
        self.unsubmitted: dict[Key, Signature] = {}
        self._joins = False  # from `join` until the next messages have been read
        self._told_joined = False
        self._plans = 0  # plans made (root) or received
        self._cache = Cache()
        self._blocked = BlockedParties(self._parties)
        self._history = History(self._children, cache_entries)

    @property
    def plans(self) -> int:
        """How many plans this rank has heard of."""
        return self._plans

    def announce(self, key: Key, signature: Signature) -> None:
        """This rank's program has submitted `key`."""
        self._announced[key] = signature
        self._tallies.count(key, signature, self._rank)
        if self._blocked.found:
            self._wake(self._rank)

    def join(self) -> None:
        """This rank's program submits nothing more until all ranks have joined."""
        self._joins = True
        if self._blocked.found:
            self._wake(self._rank)

    def report_blocked(self, pending: Sequence[tuple[Key, Signature]]) -> None:
        """This rank's program cannot go on before one of `pending` is done. Holds until the next plan or `announce`."""
        if self._rank not in self._blocked.found and not self._joins:
            self._blocked.hear(self._rank, self._plans, {self._rank: list(pending)})
            if self._parent is not None:  # the root's own step tells everybody
                self._pass_on_blocked()

    def step(self) -> list[Decision]:
        """Read the messages that have arrived, pass on what they complete, and return what is now decided, in order."""
        decisions = self._pass_on() if self._tallies.complete else []  # first, for the others may be waiting for it
        received = None
        if self._parties > 1 or self._parent is not None:
            while (received := self._transport.poll()) is not None:
                sender, message = received
                kind = message[0]
                if kind in (PLAN_ONE_KIND, PLAN_KIND):
                    decisions += self._receive_plan(message)
                    break  # to be carried out before we read on: the others wait for us in it
                if kind in (READY_ONE_KIND, READY_KIND):
                    self._receive_ready(sender, message)
                else:
                    kind, *content = pickle.loads(message)
                    if kind == "blocked":
                        self._blocked.hear(sender, *content)
                    else:
                        self._wake(sender)
                        if kind == "joined":
                            self._tallies.join(sender, content[0])
        if self._joins and received is None:  # those who have said so already have joined before this rank
            self._joins = False
            self._tallies.join(self._rank, self._rank)
        if self._tallies.complete:
            decisions += self._pass_on()
        # Only now: a parent must know of all that is ready before it hears that there will be no more.
        if self._tallies.all_joined and not self._told_joined:
            decisions += self._pass_on_joined()
        if self._blocked.found:
            decisions += self._pass_on_blocked()
        return decisions

    def _pass_on(self) -> list[Decision]:
        """Report what is complete below here; at the root, decide it."""
        complete, self._tallies.complete = self._tallies.complete, {}
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
        self._transport.post(encode_ready(self._plans, sorted(places), rest), self._parent)
        return []

    def _pass_on_one(self, key: Key, place: tuple[int, int]) -> list[Decision]:
        if self._parent is not None:
            self._transport.post(READY_ONE.pack(READY_ONE_KIND, self._plans, *place), self._parent)
            return []
        message = PLAN_ONE.pack(PLAN_ONE_KIND, *place)
        for child in self._children:
            self._transport.post(message, child)
        return self._follow([Decision((key,), None)], [], {})

    def _pass_on_joined(self) -> list[Decision]:
        last = self._tallies.last_joined
        if self._parent is None:
            return self._send_plan([Decision((), None, last)], {}, {})
        self._told_joined = True
        self._send(self._parent, "joined", last)
        return []

    # Counting up the tree

    def _receive_ready(self, sender: int, message: bytes) -> None:
        plans, runs, rest = decode_ready(message)
        cache = self._history.cache_of(sender, plans, self._cache)
        reports: list[tuple[Key, Report]] = [*cache.expand(runs), *rest]
        for key, report in self._history.still_open(reports, plans):
            self._tallies.count(key, report, sender)
        self._history.forget(self._plans)
        if self._blocked.found:
            self._wake(sender)

    # Deciding at the root, and down again

    def _decide(self, complete: Mapping[Key, Report]) -> list[Decision]:
        known: dict[Key, tuple[int, int]] = {}
        new: list[Key] = []
        signatures: dict[Key, Signature] = {}  # of what some ranks, which have joined, have not submitted
        failures = []
        for key, report in complete.items():
            if isinstance(report, dict):
                if (error := why_not_done(key, report, self._transport.size)) is not None:
                    failures.append(Decision((key,), error))
                    continue
                (report,) = report
                signatures[key] = report
                if key not in self._announced:
                    self.unsubmitted[key] = report
            if (place := self._cache.place(key, report)) is None:
                new.append(key)
            else:
                known[key] = place
        agreed = [*known, *new] if len(known) < 2 else [*sorted(known, key=known.__getitem__), *new]
        decisions = [*(Decision(tuple(group), None) for group in self._fuse(agreed)), *failures]
        return self._send_plan(decisions, known, signatures)

    def _send_plan(
        self, decisions: list[Decision], known: Mapping[Key, tuple[int, int]], signatures: Mapping[Key, Signature]
    ) -> list[Decision]:
        """Send a plan and return its decisions in the order in which all ranks carry them out."""
        if not self._children:  # a rank alone, with nobody to write to
            return self._follow(decisions, [], signatures)
        message, groups, rest = encode_plan(decisions, known, signatures)
        for child in self._children:
            self._transport.post(message, child)
        return self._follow(groups, rest, signatures)

    def _receive_plan(self, message: bytes) -> list[Decision]:
        for child in self._children:
            self._transport.post(message, child)
        if message[0] == PLAN_ONE_KIND:
            _, number, identity = PLAN_ONE.unpack(message)
            key = self._cache.key(number, identity)
            return self._follow([Decision((key,), None)], [], {})  # submitted by all, or it would not be this message
        expanded, rest, signatures = decode_plan(message, self._cache)
        if self._tallies.joined:
            signatures.update(entry for group in expanded for entry in group)
        return self._follow([Decision(tuple([key for key, _ in group]), None) for group in expanded], rest, signatures)

    def _follow(
        self, groups: list[Decision], rest: list[Decision], signatures: Mapping[Key, Signature]
    ) -> list[Decision]:
        """Enter a plan in the books: its groups were sent by ids, the rest by names.

        Args:
            groups, rest: What was decided.
            signatures: At least of what this rank has not submitted.
        """
        self._plans += 1
        if self._blocked.found:
            self._blocked.clear()
        for decision in groups:
            for key in decision.keys:
                if self._announced.pop(key, None) is None:
                    self._take_part(key, signatures)
        for decision in rest:
            for key in decision.keys:
                signature = self._announced.pop(key, None)
                if decision.error is None:
                    signature = signature or self._take_part(key, signatures)
                    self._cache = self._history.learn(key, signature, self._cache, self._plans)
                else:
                    self._tallies.forget(key)
                    self._history.fail(key, self._plans)
        self._history.forget(self._plans)
        decisions = groups + rest
        if self._tallies.all_joined and any(decision.last_joined is not None for decision in decisions):
            self._tallies.reset_joined()
            self._told_joined = False
        return decisions

    def _take_part(self, key: Key, signatures: Mapping[Key, Signature]) -> Signature:
        assert key in signatures, f"a plan has {name_of(key)}, which this rank has not submitted, and it has not joined"
        signature = self.unsubmitted[key] = signatures[key]
        return signature

    # Ranks that all wait, each for something that another has not submitted

    def _pass_on_blocked(self) -> list[Decision]:
        """Tell the parent, or as the root everybody, if all ranks here and below wait."""
        if self._blocked.told or not self._blocked.are_all(self._plans):
            return []
        pending = self._blocked.pending()
        if self._parent is not None:
            self._blocked.told = True
            self._send(self._parent, "blocked", self._plans, pending)
            return []
        keys = dict.fromkeys(key for waiting in pending.values() for key, _ in waiting if key != JOIN)
        return self._send_plan([Decision(tuple(keys), deadlock_text(pending))], {}, {})

    def _wake(self, party: int) -> None:
        if self._blocked.wake(party):
            assert self._parent is not None
            self._send(self._parent, "awake")

    def _send(self, dest: int, *content: object) -> None:
        self._transport.post(pickle.dumps(content), dest)


def error_of(decision: Decision) -> HvdliteError:
    """The exception that a failed decision raises: a new one for each caller, with the same text."""
    return MismatchError(decision.error)
