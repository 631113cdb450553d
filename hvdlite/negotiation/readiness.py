"""What has been reported to one rank of the tree: operations, and which ranks will submit nothing more for now."""

from __future__ import annotations

from hvdlite.negotiation.messages import Key, Report
from hvdlite.operations import Signature


class _Readiness:
    """Who has reported an operation, and what."""

    __slots__ = ("agreed", "first", "reports")

    def __init__(self, first: Report) -> None:
        self.first = first
        self.agreed = not isinstance(first, dict)
        self.reports: list[tuple[int, Report]] = []


class ReadyTable:
    """Counts reports of the parties of one rank: its own program, and its children for the ranks below them.

    An operation is complete when every party has reported it or has joined. A child has joined when all ranks below it have,
    and says so after it has reported all that they had submitted; so what is complete here is complete for good.

    Args:
        rank: This rank.
        size: Ranks in the tree.
        fanout: Children of each rank.

    Attributes:
        children: This rank's.
        complete: Operations that have been reported by all parties, to be taken by the controller.
        joined: The parties that have joined.
        last_joined: The rank below here (or here) that was the last to join, as far as is known here; -1 if none has.
        all_joined: All parties have joined.
    """

    def __init__(self, rank: int, size: int, fanout: int) -> None:
        self._rank, self._size, self._fanout = rank, size, fanout
        self.children = self._children_of(rank)
        self._parties = 1 + len(self.children)
        self._tallies: dict[Key, _Readiness] = {}
        self.complete: dict[Key, Report] = {}
        self.reset_joined()

    def reset_joined(self) -> None:
        """All ranks have joined, and go on."""
        self.joined: set[int] = set()
        self.last_joined = -1
        self.all_joined = False

    def count(self, key: Key, report: Report, party: int) -> None:
        """A party has reported an operation."""
        if self._parties == 1 and not isinstance(report, dict):
            self.complete[key] = report
            return
        tally = self._tallies.get(key)
        if tally is None:
            tally = self._tallies[key] = _Readiness(report)
        elif report is not tally.first and report != tally.first:
            tally.agreed = False
        tally.reports.append((party, report))
        if len(tally.reports) == self._parties or (self.joined and self._is_complete(tally)):
            self._finish(key, tally)

    def join(self, party: int, last: int) -> None:
        """A party has joined, its rank `last` after the others."""
        self.joined.add(party)
        self.last_joined = last
        self.all_joined = len(self.joined) == self._parties
        for key, tally in list(self._tallies.items()):
            if self._is_complete(tally):
                self._finish(key, tally)

    def forget(self, key: Key) -> None:
        """An operation has failed before all have reported it."""
        self._tallies.pop(key, None)
        self.complete.pop(key, None)

    def _is_complete(self, tally: _Readiness) -> bool:
        return len(self.joined.union([party for party, _ in tally.reports])) == self._parties

    def _finish(self, key: Key, tally: _Readiness) -> None:
        del self._tallies[key]
        everybody = tally.agreed and len(tally.reports) == self._parties
        self.complete[key] = tally.first if everybody else self._variants(tally)

    def _variants(self, tally: _Readiness) -> dict[Signature, list[int]]:
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
            row = [child for parent in row for child in self._children_of(parent)]
        return ranks

    def _children_of(self, rank: int) -> list[int]:
        first = rank * self._fanout + 1
        return list(range(first, min(first + self._fanout, self._size)))
