"""Keeps what a rank of an elastic job commits, and finds what the job has committed before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from hvdlite import api
from hvdlite.elastic.state import State
from hvdlite.elastic.store import Commit, Store
from hvdlite.errors import CommitError, HvdliteError
from hvdlite.launcher_link.generation import CommitId, Generation
from hvdlite.launcher_link.line import Line
from hvdlite.launcher_link.link import Address


class HostKeeper:
    """A `HostKeeper` keeps the commits of one call of ``elastic.run``, in the memory of this rank's host.

    The lowest rank of each host writes. Rank 0 tells the launcher, and hears from it what becomes of the hosts.

    Args:
        generation: The generation of the job.
        call: The number of the call of ``elastic.run`` in the program, from 0 on.
        control: The setting ``control``; empty if there is no launcher (in tests).

    Raises:
        CommitError: There is no directory for what is committed.
        HvdliteError: The launcher does not answer, or its job has other ranks than this one.
    """

    def __init__(self, generation: Generation, call: int, control: str) -> None:
        self._generation, self._call = generation, call
        self._number = 0
        self._updates = 0
        self._line: Line | None = None
        is_lowest = api.local_rank() == 0
        self._store = Store(generation.directory, generation.key, call) if is_lowest else None
        if api.rank() == 0 and control:
            try:
                self._line = Line(Address.parse(control))
                self._line.ask("elastic", rank=api.rank(), size=api.size())
            except (OSError, ValueError) as error:
                raise HvdliteError(
                    f"hvdliterun does not answer rank 0 of {api.size()} ({error}). Under hvdliterun call hvdlite.init() "
                    "without comm, so that the job has all ranks."
                ) from error

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
        if self._line is not None:
            self._line.tell("committed", call=self._call, number=self._number)

    def updates(self) -> int:
        """Return what the launcher has said of the hosts. See `Keeper`."""
        if self._line is not None:
            with contextlib.suppress(OSError):  # if the launcher is gone, all ranks end
                for message in self._line.hear():
                    self._updates |= message.fields["update"]
        return self._updates

    def leave(self) -> None:
        """Tell the launcher that this process ends, so that its job goes on with other hosts."""
        if self._line is not None:
            self._line.ask("leaving")

    def close(self) -> None:
        """Close the connection to the launcher."""
        if self._line is not None:
            self._line.close()
