"""What the watchdog of a rank tells its launcher of other ranks, and asks it."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.config import Config
from hvdlite.launcher_link.link import report_hung, stack_by_guard


class Informer:
    """Speaks with the launcher of one rank, if there is one.

    Args:
        config: The configuration.
        job_ranks: For each rank, the number by which the launcher knows it.
    """

    def __init__(self, config: Config, job_ranks: Sequence[int]) -> None:
        self._control, self._ranks = config.control, job_ranks

    def stack_of(self, rank: int) -> str:
        """Return the stacks of a rank that does not answer; empty if they are not known."""
        return stack_by_guard(self._control, self._ranks[rank], len(self._ranks))

    def has_failed(self, hung: Sequence[int], text: str) -> bool:
        """Say that ranks hang, with the report. Return whether the launcher acts on it: it ends them."""
        size = len(self._ranks)
        return any([report_hung(self._control, self._ranks[rank], size, text) for rank in hung])
