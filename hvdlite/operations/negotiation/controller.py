"""The ranks agree on the operations that are ready on all of them, and on the order in which they run.

The ranks form a tree. A rank reports an operation to its parent when its own program and all its children have reported it.
When the root knows that an operation is ready on all ranks, it sends the order to run it down the tree::

    rank 3 ─ready a─▶ rank 1 ─ready a─▶ rank 0 ─run a─▶ rank 1 ─run a─▶ rank 3

An operation needs every rank. So nothing can be decided for a rank that has submitted nothing: its messages wait until it
submits something, and no rank polls while its program computes. For a batch of operations a rank sends one message to its
parent and one to each child, whatever the number of ranks. (Horovod's coordinator, arXiv:1802.05799, gathers from all ranks at
once.)

After an operation was agreed on once, a small number stands for it. So the same batch as last time is a message of 25 bytes,
however many operations it has. All ranks receive the same plans in the same order, and number the operations in them alike
(`Cache`).

A rank that has joined counts as one that has reported every operation but milestones (`ReadyTable`). The plan tells it which
operations it takes part in: by their ids, or by the signatures that come with new names.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence

from hvdlite.errors import HvdliteError, MismatchError
from hvdlite.operations import Signature
from hvdlite.operations.negotiation.history import History
from hvdlite.operations.negotiation.messages import (
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
from hvdlite.operations.negotiation.mismatch import deadlock_text, name_of, why_not_done
from hvdlite.operations.negotiation.readiness import BlockedParties, ReadyTable
from hvdlite.protocols import Transport

FANOUT = 8
"""The number of children of a rank: few, so that no rank has much to read, and enough to keep the tree flat."""

CACHE_ENTRIES = 2**14
"""The number of entries of a cache before an empty one replaces it: enough for the names of any model, with ids of 16 bits."""


class Controller:
    """One rank's part in the agreement. Not thread-safe: its engine calls it under a lock.

    Args:
        transport: The transport for the control messages. Nobody else may post on it.
        fuse: A function that splits keys that are ready into groups to be fused. Only the root calls it.
        fanout: The number of children of each rank.
        cache_entries: The largest number of ids, at most 65536; the same on every rank.

    Attributes:
        plans: The number of plans that this rank has made (as the root) or received.
        ended: Whether this rank knows that there are no more plans.
        unsubmitted: Operations of a plan (on the root also of the plan in the making) that this rank has not submitted, because
            it has joined. The driver takes them out.
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
        self._rank = rank = transport.rank
        self._parent = (rank - 1) // fanout if rank else None
        self._ready = ReadyTable(rank, transport.size, fanout)
        self._children = self._ready.children
        self._has_others = transport.size > 1
        self._announced: dict[Key, Signature] = {}
        self.unsubmitted: dict[Key, Signature] = {}
        self._joins = False  # from `join` until the next messages have been read
        self.plans = 0
        self.ended = False
        self._cache = Cache()
        self._blocked = BlockedParties(1 + len(self._children))
        self._history = History(self._children, cache_entries)

    def announce(self, key: Key, signature: Signature) -> None:
        """Record that this rank's program has submitted the operation `key`."""
        self._announced[key] = signature
        self._ready.count(key, signature, self._rank)
        if self._blocked.found:
            self._wake(self._rank)

    def identify(self, key: Key, signature: Signature) -> tuple[int, int, int] | None:
        """Return (plans, number or -1, id), the same on all ranks for one operation; None if it has no id yet."""
        return (start := self._cache.run_start(key, signature)) and (self.plans, *start)

    def join(self) -> None:
        """Record that this rank has joined: its program submits nothing more until all ranks have joined."""
        self._joins = True
        if self._blocked.found:
            self._wake(self._rank)

    def report_blocked(self, pending: Sequence[tuple[Key, Signature]]) -> None:
        """Record that this rank's program waits for one of `pending`, until the next plan or the next `announce`."""
        if self._rank not in self._blocked.found and not self._joins:
            self._blocked.hear(self._rank, self.plans, {self._rank: list(pending)})
            if self._parent is not None:  # on the root, `step` tells all ranks
                self._pass_on_blocked()

    def end(self) -> None:
        """Make no more plans. The root calls this; whoever hears of it has received all plans that there are."""
        self.ended = True
        for child in self._children:
            self._send(child, "end")

    def has_work(self) -> bool:
        """Say whether `step` would do anything. This changes nothing."""
        ready = self._ready
        due = ready.complete or self._joins or ready.must_tell_joined or self._blocked.must_tell(self.plans)
        return bool(due) or (self._has_others and self._transport.has_message())

    def step(self) -> list[Decision]:
        """Read the messages that have arrived, report complete operations, and return the new decisions, in order."""
        if self.ended:
            return []
        # The report comes before reading: the other ranks may wait for it.
        decisions = self._pass_on() if self._ready.complete else []
        received = None
        if self._has_others:
            while (received := self._transport.poll()) is not None:
                sender, message = received
                kind = message[0]
                if kind in (PLAN_ONE_KIND, PLAN_KIND):
                    decisions += self._receive_plan(message)
                    break  # these decisions run before further messages are read: other ranks wait for this rank in them
                if kind in (READY_ONE_KIND, READY_KIND):
                    self._receive_ready(sender, message)
                else:
                    kind, *content = pickle.loads(message)
                    if kind == "end":
                        self.end()
                        return decisions
                    if kind == "blocked":
                        self._blocked.hear(sender, *content)
                    else:
                        self._wake(sender)
                        if kind == "joined":
                            self._ready.join(sender, content[0])
        if self._joins and received is None:  # ranks that joined before this one are known by now
            self._joins = False
            self._ready.join(self._rank, self._rank)
        if self._ready.complete:
            decisions += self._pass_on()
        # This comes last: a parent must know all operations that are ready before it hears that there will be no more.
        if self._ready.must_tell_joined:
            decisions += self._pass_on_joined()
        if self._blocked.found:
            decisions += self._pass_on_blocked()
        return decisions

    def _pass_on(self) -> list[Decision]:
        """Report the operations that are complete in this subtree to the parent. On the root, decide on them."""
        complete, self._ready.complete = self._ready.complete, {}
        if len(complete) == 1:  # the fast path of a blocking call
            ((key, report),) = complete.items()
            if not isinstance(report, dict) and (start := self._cache.run_start(key, report)) is not None:
                return self._pass_on_one(key, start)
        if self._parent is None:
            return self._decide(complete)
        starts, rest = [], []
        for key, report in complete.items():
            start = None if isinstance(report, dict) else self._cache.run_start(key, report)
            if start is None:
                rest.append((key, report))
            else:
                starts.append(start)
        self._transport.post(encode_ready(self.plans, sorted(starts), rest), self._parent)
        return []

    def _pass_on_one(self, key: Key, start: tuple[int, int]) -> list[Decision]:
        if self._parent is not None:
            self._transport.post(READY_ONE.pack(READY_ONE_KIND, self.plans, *start), self._parent)
            return []
        message = PLAN_ONE.pack(PLAN_ONE_KIND, *start)
        for child in self._children:
            self._transport.post(message, child)
        return self._follow([Decision((key,), None)], [], {})

    def _pass_on_joined(self) -> list[Decision]:
        last = self._ready.last_joined
        if self._parent is None:
            return self._send_plan([Decision((), None, last)], {}, {})
        self._ready.told_joined = True
        self._send(self._parent, "joined", last)
        return []

    # Counting up the tree

    def _receive_ready(self, sender: int, message: bytes) -> None:
        plans, runs, rest = decode_ready(message)
        cache = self._history.cache_of(sender, plans, self._cache)
        reports: list[tuple[Key, Report]] = [*cache.expand(runs), *rest]
        for key, report in self._history.still_open(reports, plans):
            self._ready.count(key, report, sender)
        self._history.forget(self.plans)
        if self._blocked.found:
            self._wake(sender)

    # Deciding at the root, and down again

    def _decide(self, complete: Mapping[Key, Report]) -> list[Decision]:
        known: dict[Key, tuple[int, int]] = {}
        new: list[Key] = []
        signatures: dict[Key, Signature] = {}  # for operations that joined ranks did not submit
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
            if (start := self._cache.run_start(key, report)) is None:
                new.append(key)
            else:
                known[key] = start
        agreed = [*known, *new] if len(known) < 2 else [*sorted(known, key=known.__getitem__), *new]
        decisions = [*(Decision(tuple(group), None) for group in self._fuse(agreed)), *failures]
        return self._send_plan(decisions, known, signatures)

    def _send_plan(
        self, decisions: list[Decision], known: Mapping[Key, tuple[int, int]], signatures: Mapping[Key, Signature]
    ) -> list[Decision]:
        """Send a plan, and return its decisions in the order in which all ranks carry them out."""
        if not self._children:  # the group has one rank
            return self._follow(decisions, [], signatures)
        message, groups, rest = encode_plan(decisions, known, signatures)
        for child in self._children:
            self._transport.post(message, child)
        return self._follow(groups, rest, signatures)

    def _receive_plan(self, message: bytes) -> list[Decision]:
        for child in self._children:
            self._transport.post(message, child)
        if message[0] == PLAN_ONE_KIND:
            key = self._cache.key(*PLAN_ONE.unpack(message)[1:])  # in this form, all ranks have submitted it
            return self._follow([Decision((key,), None)], [], {})
        expanded, rest, signatures = decode_plan(message, self._cache)
        if self._ready.joined:
            signatures.update(entry for group in expanded for entry in group)
        return self._follow([Decision(tuple([key for key, _ in group]), None) for group in expanded], rest, signatures)

    def _follow(
        self, groups: list[Decision], rest: list[Decision], signatures: Mapping[Key, Signature]
    ) -> list[Decision]:
        """Record a plan in the cache and the history: `groups` were sent by ids, `rest` by names.

        `signatures` has at least the operations that this rank has not submitted.
        """
        self.plans += 1
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
                    self._cache = self._history.learn(key, signature, self._cache, self.plans)
                else:
                    self._ready.forget(key)
                    self._history.fail(key, self.plans)
        self._history.forget(self.plans)
        decisions = groups + rest
        if self._ready.all_joined and any(decision.last_joined is not None for decision in decisions):
            self._ready.reset_joined()
        return decisions

    def _take_part(self, key: Key, signatures: Mapping[Key, Signature]) -> Signature:
        assert key in signatures, f"a plan has {name_of(key)}, which this rank has not submitted, and it has not joined"
        signature = self.unsubmitted[key] = signatures[key]
        return signature

    # Ranks that all wait, each for something that another has not submitted

    def _pass_on_blocked(self) -> list[Decision]:
        """Tell the parent (on the root: all ranks) if this rank and all ranks below it are blocked."""
        if not self._blocked.must_tell(self.plans):
            return []
        pending = self._blocked.pending()
        if self._parent is not None:
            self._blocked.told = True
            self._send(self._parent, "blocked", self.plans, pending)
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
    """Return the exception of a failed decision: a new object for each caller, with the same text."""
    return MismatchError(decision.error)
