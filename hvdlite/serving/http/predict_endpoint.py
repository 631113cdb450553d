"""Endpoints that compute: each reads a body within limits of size and time, and answers it. Plain ASGI, for they are busy."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple, TypeVar

from hvdlite.serving.http.bodies import JSON, READERS, WRITERS, BodyError, UnwritableError, read, write
from hvdlite.serving.http.negotiation import GZIP, deflate, inflate, preferred, shows_key, takes_gzip
from hvdlite.serving.models import Model, Version
from hvdlite.serving.options import Options
from hvdlite.serving.servable import Spec
from hvdlite.serving.service import ClientGoneError, RefusedError, Service

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
Result = TypeVar("Result")


_JSON_BYTES, _JSON_BYTES_OF_A_NUMBER = 2**16, 64
"""A JSON body for an array of a known shape has no more bytes than these, and so many for each number. To read 8 MB of JSON
takes 0.2 s, and for half of that the server does nothing else, for Python's lock is kept."""
_LARGE_TEXT = 2**16
"""A text of more bytes is read in a thread."""
_NONE: dict[str, str] = {}
_OBJECTS = 24
"""So many times the bytes of a body, at most, is what lists and dictionaries take that were read from it."""

_GONE = 499
"""The status by which requests are counted whose client is gone. Nobody gets it."""
_SMALL, _LARGE = 2**10, 2**16
"""An answer of fewer bytes is not compressed, and one of more takes time to send."""


class Intake:
    """What all endpoints share: the limits for what they read.

    Args:
        options: The limits.

    Attributes:
        memory: The bytes of all bodies that are here, and of what was read from them.
        peak: The most of that since somebody has looked.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.memory = self.peak = 0
        self.reading = TimeLimit(options.read_timeout)


class Answer(NamedTuple):
    """The answer to a request that has an output.

    Attributes:
        kind: Its Content-Type.
        data: Its body.
        headers: Further headers.
    """

    kind: str
    data: bytes
    headers: Headers = []  # noqa: RUF012  # it is never changed


class Endpoint:
    """An ASGI application that computes with a model. The formats of requests and answers are those of a subclass.

    Args:
        model: Computes.
        intake: The limits.
    """

    def __init__(self, model: Model, intake: Intake) -> None:
        self._model, self._intake, self._options = model, intake, intake.options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        body = Body(scope, receive)
        try:
            await self._serve(scope, body, send)
        finally:
            self._intake.memory -= body.memory

    async def _serve(self, scope: Scope, body: Body, send: Send) -> None:
        begin = time.monotonic()
        headers: Headers = []
        try:
            check_key(body.headers, self._options.api_key)
            with self._model.version(scope.get("path_params", _NONE).get("version")) as version:
                answer = await self._answer(version, body)
            status, kind, data = 200, answer.kind, answer.data
            headers += answer.headers
            if kind == JSON and len(data) > _SMALL and takes_gzip(body.headers.get(b"accept-encoding", b"")):
                data = await in_thread(len(data), deflate, data)
                headers += [(b"content-encoding", GZIP), (b"vary", b"accept-encoding")]
        except ClientGoneError:
            self._model.metrics.answered(_GONE, 0.0)
            return
        except RefusedError as error:
            status, kind, data = error.status, JSON, json.dumps({"error": str(error)}).encode()
            headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
        if not body.is_whole:  # what the client still sends is not read
            headers.append((b"connection", b"close"))
        self._model.metrics.answered(status, time.monotonic() - (body.came or begin))
        headers += [(b"content-type", kind.encode()), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        if len(data) > _LARGE:  # until the client has taken it, it needs memory, and the connection is in use
            body.data = b""
            body.memory += len(data)
            self._intake.memory += len(data)
            await send({"type": "http.response.body", "body": data, "more_body": True})
            data = b""  # uvicorn sends the end when the rest has gone
        await send({"type": "http.response.body", "body": data})

    async def _answer(self, version: Version, body: Body) -> Answer:
        """Return the answer to a request, whose body is not read yet.

        Raises:
            RefusedError: There is none.
            ClientGoneError: The client is gone.
        """
        raise NotImplementedError

    def _known(self, service: Service) -> Spec:
        """Return what inputs must be.

        Raises:
            RefusedError: That is not known yet, or another request would be refused.
        """
        if service.spec is None:
            raise RefusedError("no replica is ready yet.", 503, retry_after=1)
        service.check_room()
        return service.spec

    def _take(self, body: Body, count: int) -> None:
        """Count memory that a request takes until it is answered."""
        body.memory += count
        self._intake.memory += count
        self._intake.peak = max(self._intake.peak, self._intake.memory)
        if self._intake.memory > self._options.max_memory:
            raise RefusedError(
                f"the requests that are here need {self._intake.memory} bytes, which is more than all may have together "
                "(--max-memory).",
                429,
                retry_after=1,
            )

    def _take_objects(self, body: Body, value: Any, spec: Spec) -> None:
        """Count the memory of an input that is lists and dictionaries."""
        if isinstance(value, list | dict) and not spec.inputs:
            self._take(body, _OBJECTS * len(body.data))

    async def _receive(self, body: Body, limit: int, spec: Spec) -> None:
        coding = body.headers.get(b"content-encoding", b"identity").strip().lower()
        if coding not in (b"identity", GZIP):
            raise RefusedError(f"the Content-Encoding is {coding.decode('latin-1')!r}: expected gzip, or none.", 415)
        said = body.headers.get(b"content-length", b"0")
        if said.isdigit() and int(said) > limit:
            raise self._too_long(limit, spec)
        self._intake.reading.begin()
        try:
            while not body.is_whole:
                self._take(body, await body.receive())
                if len(body.data) > limit:
                    raise self._too_long(limit, spec)
        except asyncio.CancelledError:
            if not self._intake.reading.is_over():
                raise
            raise RefusedError(
                f"of the body, {len(body.data)} bytes have come in {self._options.read_timeout:g} s, and the rest has not.",
                408,
            ) from None
        finally:
            self._intake.reading.end()
        body.came = time.monotonic()
        if coding == GZIP:
            try:
                body.data = await in_thread(len(body.data), inflate, body.data, limit)
            except ValueError as error:
                raise RefusedError(str(error), 400) from None
            self._take(body, len(body.data))
            if len(body.data) > limit:
                raise self._too_long(limit, spec)

    def _too_long(self, limit: int, spec: Spec) -> RefusedError:
        why = "the most that a request may have (--max-body)"
        if limit < self._options.max_body:
            why = f"the most that JSON has for {spec}"
        return RefusedError(f"the body has more than {limit} bytes, which is {why}.", 413)


class PredictEndpoint(Endpoint):
    """``/v1/predict``, which takes one input."""

    async def _answer(self, version: Version, body: Body) -> Answer:
        headers, service = body.headers, version.service
        read_as, write_as = _formats(headers.get(b"content-type", b""), headers.get(b"accept", b"*/*"))
        limit = deadline(headers, self._options.deadline)
        spec = self._known(service)
        await self._receive(body, _longest(read_as, spec, self._options.max_body), spec)
        try:
            value = await in_thread(len(body.data), read, read_as, body.data, spec)
        except BodyError as error:
            raise RefusedError(str(error), 400) from None
        self._take_objects(body, value, spec)
        output = await service.submit(value, body.came + limit, body.gone)
        try:
            return Answer(write_as, await in_thread(getattr(output, "nbytes", 0), write, write_as, output))
        except UnwritableError as error:
            raise RefusedError(str(error), 406) from None


class Body:
    """The body of a request, as much of it as is here."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.gone: asyncio.Future[None] | None = scope.get("hvdlite.gone")
        """Done when the client is gone; None if that is not known."""
        self.data: bytes | bytearray = b""
        self.is_whole = False
        self.memory = 0
        """The bytes that are counted for it."""
        self.came = 0.0
        """When it was whole."""

    async def receive(self) -> int:
        """Wait for more, and return how many bytes have come.

        Raises:
            ClientGoneError: The client is gone.
        """
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        more = message.get("body", b"")
        self.is_whole = not message.get("more_body", False)
        if not self.data:
            self.data = more
        elif isinstance(self.data, bytearray):
            self.data += more
        else:
            self.data = bytearray(self.data) + more
        return len(more)


async def in_thread(size: int, read: Callable[..., Result], *args: Any) -> Result:
    """Return ``read(*args)``. A large text is read in a thread: meanwhile, the server answers others.

    Args:
        size: The number of bytes of the text.
        read: Reads it.
        args: The arguments.
    """
    return await asyncio.to_thread(read, *args) if size > _LARGE_TEXT else read(*args)


def check_key(headers: dict[bytes, bytes], key: str) -> None:
    """Raise unless a request shows the key of the server, if it has one.

    Args:
        headers: The headers of the request.
        key: The key; empty if the server has none.

    Raises:
        RefusedError: The request shows no key, or another one.
    """
    if not key:
        return
    if not shows_key(headers, key):
        raise RefusedError(
            "the key is wrong or missing: send it as Authorization: Bearer KEY, or as X-API-Key: KEY.", 401
        )


class TimeLimit:
    """Cancels each task that is longer than so many seconds between `begin` and `end`.

    The limit is the same for all, so the first to begin is the first to be late, and one timer serves all of them. A timer for
    each takes four times as long, and `asyncio.timeout` ten times. It is made while the event loop runs.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._begun: dict[asyncio.Task[Any], float] = {}
        self._late: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """The time of the present task begins."""
        self._begun[self._task()] = time.monotonic()
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._look)

    def is_over(self) -> bool:
        """Return whether the present task was cancelled here."""
        return self._task() in self._late

    def end(self) -> None:
        """The time of the present task does not count any more."""
        task = self._task()
        if self._begun.pop(task, None) is None:
            self._late.discard(task)
            if hasattr(task, "uncancel"):
                task.uncancel()

    def _look(self) -> None:
        self._timer = None
        now = time.monotonic()
        for task, begun in list(self._begun.items()):
            left = begun + self._seconds - now
            if left > 0:
                self._timer = self._loop.call_later(left, self._look)
                return
            del self._begun[task]
            self._late.add(task)
            task.cancel()

    def _task(self) -> asyncio.Task[Any]:
        # Without the loop, Python 3.11 asks the system for the process's number.
        task = asyncio.current_task(self._loop)
        assert task is not None
        return task


@functools.lru_cache(8)
def _longest(kind: str, spec: Spec, most: int) -> int:
    """Return how many bytes a body may have."""
    if kind != JSON or spec.shape is None or None in spec.shape:
        return most
    return min(most, _JSON_BYTES + _JSON_BYTES_OF_A_NUMBER * math.prod(size or 0 for size in spec.shape))


@functools.lru_cache(64)
def _formats(content_type: bytes, accepted: bytes) -> tuple[str, str]:
    """Return the formats of the request and of its answer."""
    said = content_type.decode("latin-1")
    kind = said.partition(";")[0].strip().lower()
    if kind not in READERS:
        raise RefusedError(f"the Content-Type is {said!r}: expected one of {', '.join(READERS)}.", 415)
    accept = accepted.decode("latin-1")
    wanted = preferred(accept, list(WRITERS), kind)
    if wanted is None:
        raise RefusedError(f"Accept is {accept!r}: expected one of {', '.join(WRITERS)}.", 406)
    return kind, wanted


def deadline(headers: dict[bytes, bytes], otherwise: float) -> float:
    """Return how many seconds a request gives the server."""
    said = headers.get(b"x-timeout-ms")
    if said is None:
        return otherwise
    try:
        seconds = float(said) / 1000
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise RefusedError(
            f"X-Timeout-Ms is {said.decode('latin-1')!r}: expected a number of milliseconds above 0.", 400
        )
    return seconds
