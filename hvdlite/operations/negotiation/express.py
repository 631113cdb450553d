"""A blocking operation that all ranks of a host call at about the same time: they see that, and nobody has to be asked.

The ranks show each other in shared memory what they call; a small operation is shown together with its data, so that its
result is there at once. If not all ranks call the same at about the same time, nothing has happened, and they agree on the
operation as on any other (`hvdlite.operations.negotiation.controller`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np

from hvdlite.comm.ballot import Ballot, What
from hvdlite.comm.gpu.groups import GroupCollectives
from hvdlite.comm.shared_memory import SharedMemoryError
from hvdlite.operations import Operation
from hvdlite.protocols import Array
from hvdlite.tensors.reduction import Reduction

_IN_VAIN = 3
_EVERY = 16
"""After `_IN_VAIN` calls in vain, one after the other, a rank tries only once in `_EVERY` plans: the others do other things.
The number of plans is the same on all ranks that wait for the same operation, so they try together."""
_SECONDS = 300e-6
"""How long a rank waits for the others to call the same, before they negotiate."""
_NOTHING = np.empty(0, np.uint8)

_complete = np.errstate(all="ignore")(Reduction.complete)  # as in every other way; this form is the faster one


class Undecided(Exception):
    """The ranks have not called the same operation at the same time."""


class Express:
    """One rank's part. It stands for the collectives of the group while an operation runs that `is_small`.

    Args:
        ballot: The ranks of the group, which share a host.
        rank: This rank in the group.
        size: The number of ranks in the group.
    """

    def __init__(self, ballot: Ballot, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._ballot = ballot
        self._what: What = 0, 0, 0
        self._begun = 0  # the turn of the ballot before the latest call
        self._in_vain = 0
        self._agreed = False

    def begin(self, what: What) -> None:
        """Prepare for a call of `run`.

        Args:
            what: What tells the operation from all others, equal on all ranks. The first number is that of the plans so far.

        Raises:
            Undecided: The ranks do not try, for they have tried in vain.
        """
        self._what, self._agreed, self._begun = what, False, self._ballot.turn
        if self._in_vain >= _IN_VAIN and what[0] % _EVERY:
            raise Undecided
        self._in_vain += 1

    def run(self, operation: Operation) -> Any:
        """Return when all ranks call this. If the operation `is_small`, run it, and return the caller's result.

        Raises:
            Undecided: Nothing has happened, on any rank.
            HvdliteError: A rank has left before it has decided.
        """
        result = None
        if operation.is_small:
            result = operation.outcome(type(operation).run_together([operation], cast(GroupCollectives, self))[0])
        if not self._agreed:
            self._show(_NOTHING)
        self._in_vain = 0
        return result

    def has_agreed(self) -> bool | None:
        """Say whether the ranks have agreed since `begin`, after an error was raised. This rank withdraws if it can.

        Returns:
            True, False, or None if that depends on another rank, which has not decided.
        """
        return self._ballot.turn != self._begun and self._ballot.settle()

    def _show(self, data: Array) -> list[Array]:
        shown = self._ballot.agree(self._what, data)
        if shown is None:
            raise Undecided
        self._agreed = True
        return shown

    # Methods of the collectives

    def allreduce(self, data: Array, how: Reduction, algorithm: str) -> None:
        """Reduce `data`, of shape ``(n,)``, over the ranks in place.

        Raises:
            Undecided: Not all ranks want this now. `data` is as it was.
        """
        shown = self._show(data)
        wide = data if how.can_be_direct(shown) else np.empty(data.size, how.wide_dtype)
        _complete(how, shown, wide, data)

    def broadcast(self, data: Array, root: int) -> None:
        """Overwrite `data`, of shape ``(n,)``, with that of rank `root`.

        Raises:
            Undecided: Not all ranks want this now. `data` is as it was.
        """
        shown = self._show(data)
        if root != self.rank:
            data[:] = shown[root]


def make_express(collectives: GroupCollectives, patience: AbstractContextManager[object]) -> Express | None:
    """Return this rank's `Express` for a group; None if its ranks do not share memory, or not as `Ballot` needs it.

    Args:
        collectives: The collectives of the group. All of its ranks call this at the same point of their sequence.
        patience: A context manager that owns a wait for a rank that is about to decide.
    """
    host = collectives.host
    if not (1 < host.size == collectives.size and host.keeps_order):
        return None
    try:
        return Express(Ballot(host, _SECONDS, patience), collectives.rank, collectives.size)
    except SharedMemoryError:  # all ranks raise it
        return None
