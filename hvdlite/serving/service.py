"""Requests become outputs: the batcher, driven by the event loop, with replicas that compute."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlite.errors import HvdliteError
from hvdlite.protocols import Array
from hvdlite.serving.batcher import Answer, Batch, Batcher, Outcome, QueueFullError, Request
from hvdlite.serving.metrics import Metrics
from hvdlite.serving.options import Options
from hvdlite.serving.replicas.contract import Replicas
from hvdlite.serving.replicas.replica import Ready
from hvdlite.serving.servable import Spec
from hvdlite.serving.suspects import Harm, Suspects
from hvdlite.serving.waiting import WaitChooser

log = logging.getLogger(__name__)


class RefusedError(HvdliteError):
    """A request has no output.

    Attributes:
        status: The HTTP status that says why.
        headers: Headers of the answer.

    Args:
        text: What is wrong, for the client.
        status: The HTTP status.
        retry_after: After how many seconds another try may succeed; None if it is of no use.
    """

    def __init__(self, text: str, status: int, retry_after: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"


class ClientGoneError(Exception):
    """The client has gone before it was answered."""


Result = tuple[Outcome, Any]
"""How a request ended, and its output or the text of the error. An `Answer` has the request too, and the request its future: as
the result of the future, it would be a cycle of references for each request, which only a collection of garbage frees."""


@dataclass(eq=False, slots=True)
class _Job:
    """What the service keeps with a request."""

    value: Any
    future: asyncio.Future[Result | None]


class Service:
    """The server without HTTP. All methods run in the thread of the event loop.

    Args:
        replicas: What computes.
        options: The settings.
        chooser: Says how long batches wait.
        metrics: Counts what happens.
    """

    def __init__(self, replicas: Replicas, options: Options, chooser: WaitChooser, metrics: Metrics) -> None:
        self._replicas, self._options, self._chooser, self._metrics = replicas, options, chooser, metrics
        self.batcher = Batcher(options.max_batch, options.max_queue, chooser)
        """The requests that wait, or are computed."""
        self._busy: dict[int, Batch] = {}
        self.there: set[int] = set()
        """The replicas that can compute."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = math.inf
        self._will_step = False
        self._open: set[asyncio.Future[Result | None]] = set()
        """The requests that are not answered yet."""
        self._suspects = Suspects()
        self._seconds_per_request = 0.0
        self.spec: Spec | None = None
        """What inputs must be; None until a replica was ready."""
        self.sample: Any = None
        """An output, from the warm-up; None if there was none."""
        self.is_draining = False
        self.is_trial = False
        """Whether it is of no use without each of its replicas: none is started again that cannot start."""

    async def __aenter__(self) -> Service:
        """Start the replicas."""
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[str] = self._loop.create_future()
        """Done, with the reason, if the replicas cannot start."""
        self.known: asyncio.Event = asyncio.Event()
        """Set when a replica is ready for the first time."""
        self.complete: asyncio.Event = asyncio.Event()
        """Set when all replicas are ready for the first time."""
        self._replicas.start(self)
        return self

    async def __aexit__(self, *error: object) -> None:
        """End the replicas."""
        if self._timer is not None:
            self._timer.cancel()
        await self._replicas.stop()

    @property
    def ready_replicas(self) -> int:
        """The number of replicas that can compute."""
        return len(self.there)

    @property
    def explanation(self) -> str:
        """How long batches wait, and why."""
        return self._chooser.explanation

    def drain(self) -> None:
        """Let batches wait for no more requests: none will come."""
        self.is_draining = True
        self.batcher.drain()
        self._step_soon()

    def give_up(self) -> None:
        """Answer all requests that are here, for the server cannot wait for them."""
        for future in self._open:
            if not future.done():
                future.set_result(None)

    def check_room(self, count: int = 1) -> None:
        """Raise if another request would be refused.

        Args:
            count: How many inputs it has.

        Raises:
            RefusedError: Too many wait, or would wait.
        """
        if count > self._options.max_queue:
            raise RefusedError(
                f"the request has {count} inputs, and {self._options.max_queue} may wait (--max-queue): send fewer at a time.",
                413,
            )
        if self.batcher.waiting + count > self._options.max_queue:
            raise self._too_many()

    async def submit(
        self, value: Any, deadline: float, gone: asyncio.Future[None] | None = None, group: object = None
    ) -> Any:
        """Let an input be computed, and return its output.

        Args:
            value: An array, or any other value.
            deadline: When the output is of no use any more, on the clock `time.monotonic`.
            gone: Done when the client is gone. The input is not computed then, unless a replica has begun.
            group: The client's request, if the input is one of several rows that are answered together.

        Raises:
            RefusedError: There is no output.
            ClientGoneError: The client is gone.
        """
        future: asyncio.Future[Result | None] = self._loop.create_future()
        begin = time.monotonic()
        request = Request(self._key(value, begin), begin, deadline, _Job(value, future), group)
        try:
            self.batcher.add(request)
        except QueueFullError:
            raise self._too_many() from None
        self._open.add(future)
        self._step_soon()

        def leave(_: asyncio.Future[None]) -> None:
            self.batcher.cancel(request)
            if not future.done():
                future.set_exception(ClientGoneError())

        if gone is not None:
            gone.add_done_callback(leave)
        try:
            result = await future
        except asyncio.CancelledError:
            self.batcher.cancel(request)
            raise
        finally:
            self._open.discard(future)
            if gone is not None:
                gone.remove_done_callback(leave)
        if result is None:
            raise RefusedError("the server ends, and could not wait for the output.", 503, retry_after=1)
        outcome, output = result
        if outcome is Outcome.DONE:
            return output
        if outcome is Outcome.EXPIRED:
            raise RefusedError(
                f"no replica was free for {time.monotonic() - begin:.2f} s, which was the time of this request.", 504
            )
        if outcome is Outcome.LOST:
            self._suspects.remember(value, Harm.LOST, time.monotonic())
            raise RefusedError(
                "the replica that computed this request has ended, and so has the second one."
                if request.has_lost
                else "the replica that computed this request alone has crashed, or took too long (--timeout).",
                503,
                retry_after=1,
            )
        if outcome is Outcome.FAILED:
            self._suspects.remember(value, Harm.RAISED, time.monotonic())
        raise RefusedError(str(output), 500)

    def ready(self, replica: int, ready: Ready) -> None:
        """A replica can compute."""
        if self.spec is None:
            for size, seconds in ready.times:
                self._chooser.served(time.monotonic(), size, seconds)
        self.spec, self.sample = ready.spec, ready.sample
        self.there.add(replica)
        self.batcher.joined(replica)
        self.known.set()
        if len(self.there) == self._options.replicas:
            self.complete.set()
        self._step_soon()

    def computed(self, replica: int, outputs: Sequence[Any] | Array) -> None:
        """A replica has computed its batch."""
        batch, now = self._busy.pop(replica), time.monotonic()
        seconds = now - batch.sent
        self._metrics.batch_done(len(batch.requests), seconds)
        share = seconds / len(batch.requests) / len(self.there)
        self._seconds_per_request += 0.1 * (share - self._seconds_per_request)
        answers = self.batcher.done(replica, outputs, now)
        if self.batcher.has_full_batch:  # the replica computes it while this process writes the answers
            self._step()
        self._answer(answers)
        self._step_soon()

    def raised(self, replica: int, text: str, blame: bool) -> None:
        """`predict` failed on a replica's batch."""
        del self._busy[replica]
        self._answer(self.batcher.raised(replica, text, blame))
        self._step_soon()

    def lost(self, replica: int, blame: bool = False) -> None:
        """A replica is gone; `blame` says whether what it computed is the cause."""
        self.there.discard(replica)
        self._busy.pop(replica, None)
        self._metrics.replica_lost()
        self._answer(self.batcher.lost(replica, blame))
        self._step_soon()

    def not_ready(self, text: str) -> None:
        """A replica cannot start."""
        if self.spec is not None and not self.is_trial:
            log.error("A replica cannot start, and will be started again: %s", text)
        else:
            self.broken(text)

    def broken(self, text: str) -> None:
        """The replicas are not kept running any more."""
        if not self.failed.done():
            self.failed.set_result(text)

    def _key(self, value: Any, now: float) -> Hashable:
        """Return what inputs of one batch have alike.

        Raises:
            RefusedError: The input has ended replicas lately.
        """
        if (suspected := self._suspects.harm_of(value, now)) is not None:
            harm, seconds = suspected
            if harm is Harm.LOST:
                raise RefusedError(
                    "the replicas that computed this input before have ended: it is not computed for another "
                    f"{math.ceil(seconds)} s.",
                    422,
                    retry_after=math.ceil(seconds),
                )
            return object()  # it is in a batch of its own
        assert self.spec is not None
        if self.spec.inputs and not self.spec.mixes_shapes:
            return tuple((each.dtype.str, each.shape) for each in value.values())
        if not isinstance(value, np.ndarray):
            return None
        return value.dtype.str if self.spec.mixes_shapes else (value.dtype.str, value.shape)

    def _too_many(self) -> RefusedError:
        waiting = self.batcher.waiting
        seconds = max(1, math.ceil(waiting * self._seconds_per_request))
        return RefusedError(f"{waiting} requests wait, which is the most that may.", 429, retry_after=seconds)

    def _step_soon(self) -> None:
        """Step when the event loop has read all that is there now, so that requests which came together go together."""
        if not self._will_step:
            self._will_step = True
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._will_step = False
        now = time.monotonic()
        actions = self.batcher.step(now)
        self._answer(actions.answers)
        for replica, batch in actions.send:
            self._busy[replica] = batch
            self._metrics.batch_sent(batch)
            self._replicas.send(replica, [request.payload.value for request in batch.requests])
        if actions.look_again < self._timer_due:  # a timer that is early does no harm, and is cheaper than a new one
            if self._timer is not None:
                self._timer.cancel()
            self._timer_due = actions.look_again
            self._timer = self._loop.call_later(max(0.0, actions.look_again - now), self._time_is_up)

    def _time_is_up(self) -> None:
        self._timer, self._timer_due = None, math.inf
        self._step_soon()

    def _answer(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            future = answer.request.payload.future
            if not future.done():  # the server may have given it up
                future.set_result((answer.outcome, answer.output))
