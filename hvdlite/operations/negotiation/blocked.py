"""Finds out whether all parties of a rank are blocked: its own program, and its children with their subtrees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdlite.operations import Signature
from hvdlite.operations.negotiation.messages import Key

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
