"""Keeps what a rank of an elastic job commits, and finds what the job has committed before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdlite import api
from hvdlite.elastic.lifeline import Lifeline
from hvdlite.elastic.state import State
from hvdlite.elastic.store import Commit, Store
from hvdlite.errors import CommitError
from hvdlite.launcher_link.generation import CommitId, Generation


class HostKeeper:
    """A `HostKeeper` keeps the commits of one call of ``elastic.run`` in one generation, in the memory of this rank's host.

    The lowest rank of each host writes. Rank 0 tells the launcher, and hears from it what becomes of the hosts.

    Args:
        generation: The generation of the job.
        call: The number of the call of ``elastic.run`` in the program, from 0 on.
        lifeline: The connection to the launcher; None if there is no launcher (in tests), or if this rank has none.

    Raises:
        CommitError: There is no directory for what is committed.
        HvdliteError: The launcher does not answer, or its job has other ranks than this one.
    """

    def __init__(self, generation: Generation, call: int, lifeline: Lifeline | None) -> None:
        self._generation, self._call = generation, call
        self._number = 0
        is_lowest = api.local_rank() == 0
        self._store = Store(generation.directory, generation.key, call) if is_lowest else None
        self._lifeline = lifeline
        self._speaker = lifeline if api.rank() == 0 else None
        if self._speaker is not None:
            self._speaker.speak()

    def load(self, state: State) -> int | None:
        """Give `state` on rank 0 the newest commit that a host of this generation has. All ranks call this.

        Returns:
            The number of ranks that have made the commit; None if the job has committed nothing yet.

        Raises:
            CommitError: The job has committed something that none of these hosts has.
        """
        found = self._store.newest() if self._store is not None else None
        mine = (found.id, found.size) if found is not None else (CommitId(), 0)
        theirs = api.allgather_object(mine, "hvdlite.elastic.found")
        newest, size = max(theirs)
        known = self._generation.committed[self._call : self._call + 1]
        if known and newest < known[0]:
            has = f"the newest that they have is number {newest.number}" if newest.generation else "they have none"
            raise CommitError(
                f"the job has committed number {known[0].number}, and none of its present hosts has it: {has}. The hosts that "
                "had it are gone, or its files were removed. Start the job anew, from a checkpoint."
            )
        if not newest.generation:
            return None
        self._number = newest.number
        self._is_kept()
        owner = theirs.index((newest, size))
        saved = found.saved if found is not None and found.id == newest else None
        if theirs[0][0] != newest:
            saved = api.broadcast_object(saved, owner, "hvdlite.elastic.load")
        if api.rank() == 0:
            assert saved is not None
            state.set_saved(saved)
            state.restore()
        return size

    def keep(self, saved: Callable[[], dict[str, Any]]) -> None:
        """Write the state, if this rank is the lowest of its host. See `Keeper`."""
        self._number += 1
        if self._store is not None:
            self._store.write(Commit(CommitId(self._generation.number, self._number), api.size(), saved()))

    def kept(self) -> None:
        """Tell the launcher that all hosts have the state."""
        self._is_kept()
        if self._speaker is not None:
            self._speaker.tell_commit(self._call, self._number)

    def _is_kept(self) -> None:
        if self._lifeline is not None:
            self._lifeline.has_committed = True

    def updates(self) -> int:
        """Return what the launcher has said of the hosts. See `Keeper`."""
        return 0 if self._speaker is None else self._speaker.updates

    def leave(self) -> None:
        """Tell the launcher that this process ends, so that its job goes on with other hosts."""
        if self._speaker is not None:
            self._speaker.leave()
