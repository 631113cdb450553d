"""How many steps each worker has made, and which workers may begin another one."""

from __future__ import annotations

from collections.abc import Collection


class Clocks:
    """The steps of the workers that still train.

    A worker whose clock is c begins its step c when `may_go_on` says so, and its clock becomes c + 1 when the server has
    received its push. So with a staleness s, the steps on which two workers work are at most s apart, as in Ho et al. (NIPS
    2013), section 3. With s = 0 all workers work on the same step.

    Args:
        workers: The workers.
        staleness: How many steps a worker may be ahead of the slowest; None for any number.
    """

    def __init__(self, workers: Collection[int], staleness: int | None) -> None:
        self._workers, self._staleness = list(workers), staleness
        self._made = dict.fromkeys(self._workers, 0)

    @property
    def training(self) -> Collection[int]:
        """The workers that train: all but those that `leave` has taken out."""
        return self._made.keys()

    def made(self, worker: int) -> int:
        """Return how many steps a worker that trains has made since the beginning or since the last `begin_again`."""
        return self._made[worker]

    def tick(self, worker: int) -> None:
        """Note that a worker has made a step."""
        self._made[worker] += 1

    def may_go_on(self, worker: int) -> bool:
        """Return whether a worker that trains may begin its next step."""
        return self._staleness is None or self._made[worker] - min(self._made.values()) <= self._staleness

    def leave(self, worker: int) -> None:
        """Take out a worker that makes no more steps: nobody waits for it any longer."""
        del self._made[worker]

    def lose(self, worker: int) -> None:
        """Take out a worker for good."""
        self._workers.remove(worker)
        self._made.pop(worker, None)

    def begin_again(self) -> None:
        """Let all workers train again, all from the same step."""
        self._made = dict.fromkeys(self._workers, 0)
