"""What an adapter makes to exchange gradients, and how it is planned."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple, Protocol


class Plan(NamedTuple):
    """How gradients are exchanged; the same on all ranks.

    Attributes:
        chunk_bytes: What is summed at a time: as many bytes of each rank as stay in a core's cache.
        message_bytes: Bytes that go between hosts at a time.
        buckets: The numbers of the tensors that are exchanged together, in the order of the exchanges; all at once if empty.
        lend: If not 0, results lie apart from gradients and may be kept by a framework, those of so many exchanges at a time.
        spare: Each rank has a second buffer for results, for when its program holds what is in the first.
    """

    chunk_bytes: int = 2**18
    message_bytes: int = 25 * 2**20
    buckets: tuple[tuple[int, ...], ...] = ()
    lend: int = 0
    spare: bool = False


class Exchange(Protocol):
    """What an adapter has made to exchange gradients, for `hvdlite.join`.

    Attributes:
        dropped: The program cannot use it any more on this rank.
        memory_only: It has nothing to catch up.
        passes: How far this rank has gone with each of its optimizers, in passes that the program adds up between two
            exchanges. Ranks know an optimizer by the same key. Empty if it is not known.
    """

    @property
    def dropped(self) -> bool: ...

    @property
    def memory_only(self) -> bool: ...

    @property
    def passes(self) -> Mapping[Hashable, int]: ...

    def keep(self) -> object:
        """What keeps it from being dropped as long as the caller holds it; None if it has been dropped."""
        ...

    def release(self) -> None:
        """Release what it holds: all ranks have dropped it. Every rank calls this."""
        ...

    def stand_in(self) -> None:
        """Take part in the exchanges of the others with nothing, until all ranks have joined."""
        ...

    def catch_up(self, last: int) -> None:
        """Make up for the steps that were not taken meanwhile. All ranks call this.

        Args:
            last: The rank that joined last; its rank in the job.
        """
        ...
