"""Which requests go together, when, and to which replica: a state machine without threads, sockets and clocks.

A request waits in the queue of its key (its shape and dtype). A batch has requests of one key, in the order in which they came.
The timer of a queue starts with its oldest request. A batch goes to an idle replica when it is full, or when the time-out is up
that the `WaitChooser` gives, or at once where it gives none. What fails is tried again:

- A batch on which `predict` raised is computed in parts, until each request that makes it raise is alone. The others are
  answered (`hvdlite.serving.isolation`).
- A batch whose replica was lost is tried once more, each request alone: so a request that kills its replica takes no other
  request with it. Those that lose a second replica are given up, and so is one that was alone in its batch and is to blame.
- The rows of one client's request are answered together. If `predict` raised on a batch of nothing else, no row is tried again.

While requests wait that are computed for the first time, they have every second batch at least.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvdlite.errors import HvdliteError
from hvdlite.serving.isolation import Isolation, Part
from hvdlite.serving.waiting import WaitChooser


class QueueFullError(HvdliteError):
    """So many requests wait that another one is refused."""


class Outcome(enum.Enum):
    """How a request ended."""

    DONE = "done"
    EXPIRED = "expired"
    """Its deadline passed before a replica could begin with it."""
    FAILED = "failed"
    """`predict` raised because of it, or returned something that is no answer."""
    SPOILED = "spoiled"
    """`predict` failed on its batch, and it is not known whether because of it: no row of its request is of use any more, or no
    single request can be the cause."""
    LOST = "lost"
    """It lost two replicas, or one that it had for itself and ended."""


class Reason(enum.Enum):
    """Why requests are computed again."""

    RAISED = "raised"
    LOST = "lost"


@dataclass(eq=False, slots=True)
class Request:
    """One input.

    Attributes:
        key: Requests of equal keys may share a batch.
        arrived: When it came, in seconds.
        deadline: When its answer is of no use any more, in seconds; infinite if never.
        payload: What the caller needs to compute and to answer it. The batcher does not look at it.
        group: The client's request of which it is a row, if that has several: either all of them are answered, or none.
        has_lost: Whether it has lost a replica.
        is_gone: Whether nobody waits for its answer any more.
        serial: Its place in the order of all requests; the batcher gives it.
    """

    key: Hashable
    arrived: float
    deadline: float
    payload: Any
    group: object = None
    has_lost: bool = False
    is_gone: bool = False
    serial: int = -1


class Answer(NamedTuple):
    """A request that is over.

    Attributes:
        request: The request.
        outcome: How it ended.
        output: Of `Outcome.DONE`, its output; of `Outcome.FAILED` and `Outcome.SPOILED`, the text of the error.
    """

    request: Request
    outcome: Outcome
    output: Any = None


@dataclass(eq=False, slots=True)
class Batch:
    """Requests that a replica computes together.

    Attributes:
        requests: Of one key, in the order in which they came.
        sent: When the replica got it, in seconds.
        again: Why its requests are computed again; None if it is the first time.
        part: Of which failed batch it is a part; None if it is none.
    """

    requests: list[Request]
    sent: float
    again: Reason | None
    part: Part[Request] | None = None


@dataclass(slots=True)
class Actions:
    """What is to be done now.

    Attributes:
        send: Replicas and the batches that they get.
        answers: Requests that are over.
        look_again: When `Batcher.step` must be called again if nothing happens before; infinite if never.
    """

    send: list[tuple[int, Batch]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    look_again: float = math.inf


class _Queue(OrderedDict[int, Request]):
    """Requests that may share a batch, by their serial numbers, in the order in which they came."""

    def __init__(self) -> None:
        super().__init__()
        self._urgent: float | None = math.inf

    @property
    def urgent(self) -> float:
        """When the first of them must go. Of the time until a deadline, half is for computing."""
        if self._urgent is None:
            self._urgent = min(map(_urgent, self.values()), default=math.inf)
        return self._urgent

    def put(self, request: Request) -> None:
        """Add a request at the end."""
        self[request.serial] = request
        if self._urgent is not None:
            self._urgent = min(self._urgent, _urgent(request))

    def take(self, serial: int) -> Request:
        """Remove a request, and return it."""
        request = self.pop(serial)
        if self._urgent is not None and _urgent(request) <= self._urgent < math.inf:
            self._urgent = None  # found again when somebody asks
        return request


def _urgent(request: Request) -> float:
    return request.arrived + (request.deadline - request.arrived) / 2


class Batcher:
    """The queues, the replicas, and what each replica computes.

    The caller reports what happens, calls `step` after it, and does what `step` says. Times never decrease.

    Args:
        max_batch: The most requests of a batch.
        max_queue: The most requests that wait for a replica. Those that are tried again count, but are never refused.
        chooser: Says how long the oldest request waits for others. It is told of arrivals and service times.
    """

    def __init__(self, max_batch: int, max_queue: int, chooser: WaitChooser) -> None:
        self._max_batch, self._max_queue, self._chooser = max_batch, max_queue, chooser
        self._queues: dict[Hashable, _Queue] = {}
        self._again = _Queue()
        """What is computed again."""
        self._lost: deque[Request] = deque()
        """Of these, the ones that have lost a replica. Some may not wait any more."""
        self._isolations: list[Isolation[Request]] = []
        self._had_its_turn = False
        """Whether the last batch was computed again."""
        self._where: dict[int, _Queue] = {}
        """For each request that waits, by its serial number: the queue that it is in."""
        self._deadlines: list[tuple[float, int]] = []
        """A heap of the deadlines and serial numbers of all that wait, and of some that do not wait any more."""
        self._serials = itertools.count()
        self._idle: deque[int] = deque()
        self._busy: dict[int, Batch] = {}
        self.computing = 0
        """The number of requests that replicas compute."""
        self._is_draining = False

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a replica."""
        return len(self._where)

    @property
    def _here(self) -> int:
        return len(self._where) + self.computing

    @property
    def is_full(self) -> bool:
        """Whether another request would be refused."""
        return len(self._where) >= self._max_queue

    @property
    def has_full_batch(self) -> bool:
        """Whether a batch waits that will not become larger."""
        return any(len(queue) >= self._max_batch for queue in self._queues.values())

    def drain(self) -> None:
        """Let no batch wait for more requests from now on: none will come."""
        self._is_draining = True

    def add(self, request: Request) -> None:
        """Take a request.

        Raises:
            QueueFullError: Too many wait.
        """
        if self.is_full:
            raise QueueFullError(f"{self.waiting} requests wait, which is the most.")
        request.serial = next(self._serials)
        queue = self._queues.get(request.key)
        if queue is None:
            queue = self._queues[request.key] = _Queue()
        self._put(queue, request)
        self._chooser.arrived(request.arrived, self._here, request.key)

    def cancel(self, request: Request) -> None:
        """Forget a request whose answer nobody wants. If a replica computes it, it is not computed again."""
        request.is_gone = True
        if request.serial in self._where:
            self._forget(request.serial)

    def joined(self, replica: int) -> None:
        """Learn that a replica is there, and idle."""
        self._idle.append(replica)

    def lost(self, replica: int, blame: bool = False) -> list[Answer]:
        """Learn that a replica is gone. Return the requests that are over with that.

        Args:
            replica: The replica.
            blame: Whether what it computed is the cause, so that a request which was alone is not tried again.
        """
        if replica in self._idle:
            self._idle.remove(replica)
            return []
        batch = self._end(replica)
        if batch.part is not None:
            batch.part.lost()
        is_known = blame and len(batch.requests) == 1
        given_up = [request for request in batch.requests if request.has_lost or is_known]
        for request in self._put_again([request for request in batch.requests if request not in given_up]):
            request.has_lost = True
            self._lost.append(request)
        return [Answer(request, Outcome.LOST) for request in given_up]

    def done(self, replica: int, outputs: Iterable[Any], now: float) -> list[Answer]:
        """Learn the outputs of a replica's batch, as many as it has requests. Return the requests that are over with that."""
        batch = self._release(replica)
        if batch.part is not None:
            batch.part.passed()
        if batch.again is None:
            self._chooser.served(now, len(batch.requests), now - batch.sent)
        return [Answer(request, Outcome.DONE, output) for request, output in zip(batch.requests, outputs, strict=True)]

    def raised(self, replica: int, error: str, blame: bool = True) -> list[Answer]:
        """Learn that `predict` failed on a replica's batch. Return the requests that are over with that.

        Args:
            replica: The replica, which is idle now.
            error: What happened, for whoever sent the requests.
            blame: Whether single requests may have caused it, so that it helps to compute the others without them.
        """
        batch = self._release(replica)
        first = batch.requests[0]
        is_one = first.group is not None and all(request.group is first.group for request in batch.requests)
        is_over = len(batch.requests) == 1 or is_one or not blame
        if batch.part is not None:
            (batch.part.lost if is_over else batch.part.raised)()
        if is_over:
            outcome = Outcome.FAILED if blame and len(batch.requests) == 1 else Outcome.SPOILED
            return [Answer(request, outcome, error) for request in batch.requests]
        waiting = self._put_again(batch.requests)
        if batch.part is None and waiting:
            self._isolations.append(Isolation(waiting, lambda request: request.serial in self._again))
        return []

    def step(self, now: float) -> Actions:
        """Return what is to be done at a time: batches to send, requests that are too late, and when to look again."""
        actions = Actions()
        self._drop_expired(now, actions.answers)
        while self._idle:
            wait = self._chooser.wait(now, self._here)
            batch = self._next(now, wait)
            if batch is None:
                actions.look_again = min((self._due(each, wait) for each in self._queues.values()), default=math.inf)
                break
            replica = self._idle.popleft()
            self._busy[replica] = batch
            self.computing += len(batch.requests)
            actions.send.append((replica, batch))
        if self._where:
            actions.look_again = min(actions.look_again, self._next_deadline())
        return actions

    def _release(self, replica: int) -> Batch:
        self._idle.append(replica)
        return self._end(replica)

    def _end(self, replica: int) -> Batch:
        batch = self._busy.pop(replica)
        self.computing -= len(batch.requests)
        return batch

    def _put(self, queue: _Queue, request: Request) -> None:
        queue.put(request)
        self._where[request.serial] = queue
        if request.deadline < math.inf:
            heapq.heappush(self._deadlines, (request.deadline, request.serial))
            if len(self._deadlines) > 64 + 2 * len(self._where):  # most of them do not wait any more
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self._where]
                heapq.heapify(self._deadlines)

    def _put_again(self, requests: Iterable[Request]) -> list[Request]:
        """Let requests be computed again, and return those that somebody waits for."""
        waiting = [request for request in requests if not request.is_gone]
        for request in waiting:
            self._put(self._again, request)
        return waiting

    def _next_deadline(self) -> float:
        while self._deadlines and self._deadlines[0][1] not in self._where:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def _drop_expired(self, now: float, answers: list[Answer]) -> None:
        while self._next_deadline() <= now:
            answers.append(Answer(self._forget(heapq.heappop(self._deadlines)[1]), Outcome.EXPIRED))

    def _forget(self, serial: int) -> Request:
        queue = self._where.pop(serial)
        request = queue.take(serial)
        if not queue and self._queues.get(request.key) is queue:
            del self._queues[request.key]
        return request

    def _next(self, now: float, wait: float) -> Batch | None:
        """Take the batch that goes at a time: one that is tried again, or the one whose time was up first; both in turns."""
        key, due = None, math.inf
        for each, queue in self._queues.items():
            its = self._due(queue, wait)
            if its < due:
                key, due = each, its
        if (due > now or not self._had_its_turn) and (batch := self._next_again(now)):
            self._had_its_turn = True
            return batch
        self._had_its_turn = False
        if due > now:
            return None
        queue = self._queues[key]
        batch = Batch(self._take(queue, list(itertools.islice(queue, self._max_batch))), now, None)
        if not queue:
            del self._queues[key]
        return batch

    def _next_again(self, now: float) -> Batch | None:
        for isolation in list(self._isolations):
            part = isolation.take()
            if part is not None:
                requests = self._take(self._again, [request.serial for request in part.requests])
                return Batch(requests, now, Reason.RAISED, part)
            if not isolation.computing:
                self._isolations.remove(isolation)
        while self._lost:
            serial = self._lost.popleft().serial
            if serial in self._again:
                return Batch(self._take(self._again, [serial]), now, Reason.LOST)
        return None

    def _take(self, queue: _Queue, serials: Iterable[int]) -> list[Request]:
        requests = [queue.take(serial) for serial in serials]
        for request in requests:
            del self._where[request.serial]
        return requests

    def _due(self, queue: _Queue, wait: float) -> float:
        """When a queue's next batch goes if a replica is idle, and its oldest request waits for so long."""
        first = next(iter(queue.values()))
        if len(queue) >= self._max_batch or self._is_draining:
            return first.arrived
        return min(first.arrived + wait, queue.urgent)
