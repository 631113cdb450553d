"""What a server does with each request. No messages are in here: the caller delivers requests one by one, and sends answers."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from hvdlite.async_sgd.compensation import NO_COMPENSATION, DelayCompensation
from hvdlite.async_sgd.deal import ServerLayout
from hvdlite.async_sgd.messages import Purpose
from hvdlite.async_sgd.part import Push, ServerPart
from hvdlite.protocols import Array


class Mode(enum.Enum):
    """When pushes are applied, and when they are answered. See the docstring of this package."""

    SYNC = "sync"
    SSP = "ssp"
    ASYNC = "async"


class Reply(NamedTuple):
    """An answer that is due now.

    Attributes:
        rank: The rank that gets it.
        purpose: Of a meeting, what it was for; else `Purpose.PUSH`.
        missed: See `messages.ServerAnswer`.
        error: The text of an error; empty if there is none.
        values: The present values of the part: uint8, shape ``(nbytes,)``. The memory is valid until the rank asks again.
            Empty if there is an error.
    """

    rank: int
    purpose: Purpose
    missed: int = 0
    error: str = ""
    values: Array = np.empty(0, np.uint8)


class ParameterServer:
    """One part of the parameters, and the state of the workers.

    A rank has at most one request at a server. So it has made all its pushes when it comes to a meeting, and the meeting takes
    place when all ranks are there. Until then, the workers that are there count as having left the training.

    Args:
        part: The parameters.
        layout: Their places.
        workers: The ranks that train.
        others: The ranks that come to meetings only.
        mode: When pushes are applied and answered.
        staleness: How far a worker may be ahead of the slowest one, in steps; for `Mode.SSP`.
        names: For each rank, its number in the job, for error texts.
        compensation: What to do about old gradients; only for modes in which pushes are applied one by one.
    """

    def __init__(
        self,
        part: ServerPart,
        layout: ServerLayout,
        workers: Collection[int],
        others: Collection[int],
        mode: Mode,
        staleness: int | None,
        names: Sequence[int],
        compensation: DelayCompensation = NO_COMPENSATION,
    ) -> None:
        self._part, self._layout, self._mode, self._names, self._compensation = part, layout, mode, names, compensation
        self._everybody = {*workers, *others}
        self._clocks = Clocks(workers, staleness if mode is Mode.SSP else None)
        self._pushed = dict.fromkeys(workers, 0)
        self._early: dict[int, set[int]] = {worker: set() for worker in workers}
        """The chunks of each worker's next push that have come."""
        self._waiting: dict[int, Push | None] = {}
        """The workers whose pushes were not answered yet; each push is there until it is applied."""
        self._missed: dict[int, int] = {}
        self._seen = dict.fromkeys(workers, 0)
        self._values: dict[int, Array] = {}
        """The values that each rank was sent last."""
        self._is_new = True
        """Whether the part was given other values since then. All workers have those."""
        self._met: dict[int, Purpose] = {}
        self._error = ""
        self.applied = 0
        """The number of pushes that were applied."""
        self.is_over = False
        """Whether the ranks have met to finish."""

    def early(self, worker: int, number: int, chunk: int) -> list[Reply]:
        """Note that a chunk of a worker's next push has come. It is in the memory of that push.

        Args:
            worker: The rank that has sent it.
            number: How many pushes it has made before.
            chunk: The number of the chunk.

        Returns:
            The answers that are due now. There is none to the chunk.
        """
        if self._error:
            return []
        if number != self._pushed[worker] or worker in self._waiting:
            return self._fail(
                f"rank {self._names[worker]} has sent a part of push {number} after {self._pushed[worker]} pushes: a push was "
                "lost, or came twice."
            )
        self._early[worker].add(chunk)
        return []

    def push(self, worker: int, number: int, push: Push) -> list[Reply]:
        """Take a push.

        Args:
            worker: The rank that pushes.
            number: How many pushes it has made before.
            push: What it pushes. Its memory is valid until the push was applied: in `Mode.SYNC` until its answer is due, else
                until this method returns.

        Returns:
            The answers that are due now.
        """
        if self._error:
            return [Reply(worker, Purpose.PUSH, error=self._error)]
        if number != self._pushed[worker] or worker not in self._clocks.training:
            return self._fail(
                f"rank {self._names[worker]} has sent push {number} after {self._pushed[worker]} pushes: a push was lost, "
                "or came twice.",
                worker,
            )
        came, self._early[worker] = self._early[worker], set()
        for chunk, (places, *_) in enumerate(self._layout.chunks):
            if push.present[places].any() and not push.follows[chunk] and chunk not in came:
                return self._fail(
                    f"rank {self._names[worker]} has sent push {number} without its chunk {chunk}: a message was lost.",
                    worker,
                )
        if self._is_new and self._compensation.needs_pulled:
            for each in self._pushed:
                self._read(each)
        self._is_new = False
        self._pushed[worker] += 1
        self._clocks.tick(worker)
        self._waiting[worker] = push
        if self._mode is not Mode.SYNC:
            self._apply([worker])
        return self._go_on()

    def meet(self, rank: int, purpose: Purpose) -> list[Reply]:
        """Take the request of a rank to meet all others, and return the answers that are due now."""
        if self._error:
            return [Reply(rank, purpose, error=self._error)]
        self._met[rank] = purpose
        if rank in self._clocks.training:
            self._clocks.leave(rank)
        return self._hold_meeting()

    def lose(self, worker: int) -> list[Reply]:
        """Go on without a worker that has failed, and return the answers that are due now.

        Its pushes that were applied stay. One that waits for those of others is dropped. Nobody waits for this worker.
        """
        self._everybody.discard(worker)
        self._met.pop(worker, None)
        self._waiting.pop(worker, None)
        self._clocks.lose(worker)
        return self._hold_meeting() if not self._error and self._met else self._go_on()

    def _hold_meeting(self) -> list[Reply]:
        """Return the answers to all ranks if all have come; until then, what is due among the others."""
        if self._met.keys() != self._everybody:
            return self._go_on()
        met, self._met = self._met, {}
        wanted = {purpose for purpose in met.values() if purpose is not Purpose.SERVE}
        if len(wanted) > 1:
            said = ", ".join(f"rank {self._names[rank]} {met[rank].text}" for rank in sorted(met) if met[rank].text)
            return self._fail(
                f"the ranks meet for different calls: {said}. All ranks make these calls in the same order.", *met
            )
        (common,) = wanted or {Purpose.FINISH}
        self.is_over, self._is_new = common is Purpose.FINISH, common is Purpose.LOAD
        self._clocks.begin_again()
        self._seen = dict.fromkeys(self._seen, self.applied)
        return [Reply(rank, common, values=self._read(rank)) for rank in sorted(met)]

    def _read(self, rank: int) -> Array:
        if rank not in self._values:
            self._values[rank] = np.empty(self._layout.nbytes, np.uint8)
        self._part.read(self._values[rank])
        return self._values[rank]

    def _go_on(self) -> list[Reply]:
        """Apply what can be applied now, and return the answers that are due."""
        if self._mode is Mode.SYNC:
            if not self._waiting or not self._waiting.keys() >= set(self._clocks.training):
                return self._failed()
            self._apply(sorted(self._waiting))
        due = [worker for worker in sorted(self._waiting) if self._mode is Mode.SYNC or self._clocks.may_go_on(worker)]
        if self._error:
            return self._failed()
        for worker in due:
            del self._waiting[worker]
            self._seen[worker] = self.applied
        return [Reply(worker, Purpose.PUSH, self._missed[worker], values=self._read(worker)) for worker in due]

    def _apply(self, workers: Sequence[int]) -> None:
        pushes = [push for worker in workers if (push := self._waiting[worker]) is not None]
        if any(push.settings != pushes[0].settings for push in pushes):
            self._error = (
                f"ranks {', '.join(str(self._names[worker]) for worker in workers)} push with different learning rates or "
                'settings: with mode="sync" all ranks set them alike.'
            )
            return
        for worker in workers:
            self._missed[worker] = 0 if self._mode is Mode.SYNC else self.applied - self._seen[worker]
        if self._mode is not Mode.SYNC:
            pushes = [self._compensated(worker, push) for worker, push in zip(workers, pushes, strict=True)]
        try:
            self._part.step(pushes)
        except Exception as error:
            self._error = f"the optimizer has failed on its server: {type(error).__name__}: {error}"
            return
        for worker in workers:
            self._waiting[worker] = None
        self.applied += len(pushes)

    def _compensated(self, worker: int, push: Push) -> Push:
        pulled = self._values[worker] if self._compensation.needs_pulled else None
        return push._replace(rate=self._compensation.rate(self._missed[worker]), pulled=pulled)

    def _fail(self, text: str, *ranks: int) -> list[Reply]:
        """Fail for good: `ranks`, and all that wait, get this error now, and all others when they ask."""
        self._error = text
        return [Reply(rank, Purpose.PUSH, error=text) for rank in sorted({*ranks, *self._failed_ranks()})]

    def _failed(self) -> list[Reply]:
        return self._fail(self._error) if self._error else []

    def _failed_ranks(self) -> list[int]:
        ranks = [*self._waiting, *self._met]
        self._waiting, self._met = {}, {}
        return ranks


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
