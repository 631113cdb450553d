"""The contract of the object that an adapter makes to exchange gradients, and the plan of an exchange."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple, Protocol


class Plan(NamedTuple):
    """The plan by which gradients are exchanged; the same on all ranks.

    Attributes:
        chunk_bytes: The number of bytes of each rank that are summed at a time, so that they stay in a core's cache.
        message_bytes: The number of bytes of a message between hosts.
        buckets: For each bucket the indices of its tensors, in the order of exchange. Empty for one bucket with all tensors.
        lend: The number of exchanges whose results a framework may keep. If not 0, results lie apart from gradients.
        spare: True if each rank has a second buffer for results, which is used while the program holds the first.
    """

    chunk_bytes: int = 2**18
    message_bytes: int = 25 * 2**20
    buckets: tuple[tuple[int, ...], ...] = ()
    lend: int = 0
    spare: bool = False


class Exchange(Protocol):
    """The object that an adapter has made to exchange gradients, as `hvdlite.join` sees it.

    Attributes:
        dropped: True if the program on this rank cannot use the object any more.
        memory_only: True if there is nothing to catch up after a join.
        passes: For each optimizer the number of backward passes that this rank has given to it. An optimizer has the same key
            on all ranks. Empty if the numbers are not known.
    """

    @property
    def dropped(self) -> bool: ...

    @property
    def memory_only(self) -> bool: ...

    @property
    def passes(self) -> Mapping[Hashable, int]: ...

    def keep(self) -> object:
        """Return an object that keeps the exchange alive while the caller holds it; None if the exchange was dropped."""
        ...

    def release(self) -> None:
        """Release everything. Every rank calls this, after all ranks have dropped the object."""
        ...

    def stand_in(self) -> None:
        """Take part in the exchanges of the other ranks without values, until all ranks have joined."""
        ...

    def catch_up(self, last: int) -> None:
        """Catch up with the steps that the other ranks took meanwhile. All ranks call this.

        Args:
            last: The rank in the job of the rank that joined last.
        """
        ...
