"""Which parties of one rank of the tree (its own program, and its children for the ranks below them) wait, each for another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdlite.negotiation.messages import Key
from hvdlite.operations import Signature

Pending = Mapping[int, Sequence[tuple[Key, Signature]]]
"""By rank: what it has submitted and waits for."""


class BlockedParties:
    """Parties whose ranks submit nothing more before something is done that they have submitted.

    Args:
        parties: How many parties this rank has.

    Attributes:
        found: The parties that are blocked: how many plans each has followed, and what its ranks wait for.
        told: The parent has been told that all of them are blocked.
    """

    def __init__(self, parties: int) -> None:
        self._parties = parties
        self.found: dict[int, tuple[int, Pending]] = {}
        self.told = False

    def hear(self, party: int, plans: int, pending: Pending) -> None:
        """All ranks of a party are blocked, which has followed so many plans."""
        self.found[party] = plans, pending

    def wake(self, party: int) -> bool:
        """A party goes on. Returns whether the parent must be told."""
        self.found.pop(party, None)
        told, self.told = self.told, False
        return told

    def clear(self) -> None:
        """A plan may let every party go on, on all ranks alike."""
        self.found.clear()
        self.told = False

    def are_all(self, plans: int) -> bool:
        """Whether all parties are blocked. A report from before the latest plan is out of date: that may let a rank go on."""
        return sum(heard == plans for heard, _ in self.found.values()) == self._parties

    def pending(self) -> dict[int, Sequence[tuple[Key, Signature]]]:
        """What all ranks here and below wait for."""
        return {rank: keys for _, pending in self.found.values() for rank, keys in pending.items()}
