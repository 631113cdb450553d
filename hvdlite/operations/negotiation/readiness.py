"""What was reported to one rank of the tree: operations, ranks that have joined, and ranks that wait for what others lack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdlite.operations import Signature, needs_every_rank
from hvdlite.operations.negotiation.messages import Key, Report


class _Readiness:
    """One operation of the table: the parties that have reported it, and the signatures of their ranks."""

    __slots__ = ("agreed", "first", "needs_every_rank", "reports")

    def __init__(self, first: Report) -> None:
        self.first = first
        self.agreed = not isinstance(first, dict)
        self.needs_every_rank = not isinstance(first, dict) and needs_every_rank(first)
        self.reports: list[tuple[int, Report]] = []


class ReadyTable:
    """Counts the reports of the parties of one rank: its own program, and its children with their subtrees.

    An operation is complete when every party has reported it or has joined (some operations need every rank: there, joining
    does not count). A child has joined when it and all ranks below it
    have joined. The child says so after it has reported all operations that they had submitted. So a complete operation stays
    complete.

    Args:
        rank: The number of this rank.
        size: The number of ranks in the tree.
        fanout: The number of children of each rank.

    Attributes:
        children: The children of this rank.
        complete: The complete operations. The controller takes them out.
        joined: The parties that have joined.
        last_joined: The rank of this subtree that joined last, as far as this rank knows; -1 if none has joined.
        all_joined: True if all parties have joined.
        told_joined: True if this rank has told its parent so.
    """

    def __init__(self, rank: int, size: int, fanout: int) -> None:
        self._rank, self._size, self._fanout = rank, size, fanout
        self.children = self._children_of(rank)
        self._parties = 1 + len(self.children)
        self._table: dict[Key, _Readiness] = {}
        self.complete: dict[Key, Report] = {}
        self.reset_joined()

    def reset_joined(self) -> None:
        """Forget who has joined: all ranks have, and go on."""
        self.joined: set[int] = set()
        self.last_joined = -1
        self.all_joined = self.told_joined = False

    @property
    def must_tell_joined(self) -> bool:
        """True if all parties have joined, and this rank has not told its parent yet."""
        return self.all_joined and not self.told_joined

    def count(self, key: Key, report: Report, party: int) -> None:
        """Record that `party` has reported the operation `key`."""
        if self._parties == 1 and not isinstance(report, dict):
            self.complete[key] = report
            return
        entry = self._table.get(key)
        if entry is None:
            entry = self._table[key] = _Readiness(report)
        elif report is not entry.first and report != entry.first:
            entry.agreed = False
        entry.reports.append((party, report))
        if len(entry.reports) == self._parties or (self.joined and self._is_complete(entry)):
            self._finish(key, entry)

    def join(self, party: int, last: int) -> None:
        """Record that `party` has joined. `last` is the rank of this party that joined last."""
        self.joined.add(party)
        self.last_joined = last
        self.all_joined = len(self.joined) == self._parties
        for key, entry in list(self._table.items()):
            if self._is_complete(entry):
                self._finish(key, entry)

    def forget(self, key: Key) -> None:
        """Remove an operation that has failed before all parties have reported it."""
        self._table.pop(key, None)
        self.complete.pop(key, None)

    def _is_complete(self, entry: _Readiness) -> bool:
        reported = [party for party, _ in entry.reports]
        counted = reported if entry.needs_every_rank else self.joined.union(reported)
        return len(counted) == self._parties

    def _finish(self, key: Key, entry: _Readiness) -> None:
        del self._table[key]
        everybody = entry.agreed and len(entry.reports) == self._parties
        self.complete[key] = entry.first if everybody else self._variants(entry)

    def _variants(self, entry: _Readiness) -> dict[Signature, list[int]]:
        variants: dict[Signature, list[int]] = {}
        for party, report in entry.reports:
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
            row = [child for parent in row for child in self._children_of(parent)]
        return ranks

    def _children_of(self, rank: int) -> list[int]:
        first = rank * self._fanout + 1
        return list(range(first, min(first + self._fanout, self._size)))


Pending = Mapping[int, Sequence[tuple[Key, Signature]]]
"""For each rank: the operations that it has submitted and waits for."""


class BlockedParties:
    """The blocked parties of one rank: their ranks submit nothing more before one of their operations is done.

    Args:
        parties: The number of parties of this rank.

    Attributes:
        found: For each blocked party the number of plans that it has followed, and the operations that its ranks wait for.
        told: True if this rank has told its parent that all its parties are blocked.
    """

    def __init__(self, parties: int) -> None:
        self._parties = parties
        self.found: dict[int, tuple[int, Pending]] = {}
        self.told = False

    def hear(self, party: int, plans: int, pending: Pending) -> None:
        """Record that all ranks of a party are blocked. `plans` is the number of plans that the party has followed."""
        self.found[party] = plans, pending

    def wake(self, party: int) -> bool:
        """Record that a party goes on. Return whether the parent must be told."""
        self.found.pop(party, None)
        told, self.told = self.told, False
        return told

    def clear(self) -> None:
        """Forget all parties: a new plan may let each of them go on. All ranks do this at the same plan."""
        self.found.clear()
        self.told = False

    def must_tell(self, plans: int) -> bool:
        """Say whether all parties are blocked, and nobody has been told. A report from before the latest plan does not count:
        the plan may end it.
        """
        if not self.found or self.told:
            return False
        return sum(heard == plans for heard, _ in self.found.values()) == self._parties

    def pending(self) -> dict[int, Sequence[tuple[Key, Signature]]]:
        """Return the operations that this rank and all ranks below it wait for."""
        return {rank: keys for _, pending in self.found.values() for rank, keys in pending.items()}
