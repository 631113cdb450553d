"""What uvicorn does not do for connections: limits for their number and their headers, and ends that clients understand."""

from __future__ import annotations

import asyncio
import fcntl
import select
import struct
import termios
from typing import Any, cast

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from hvdlite.serving.metrics import ConnectionMetrics
from hvdlite.serving.options import Options

_MOST_HEADER_BYTES = 2**16
HEALTH = (b"/healthz", b"/readyz", b"/v2/health/live", b"/v2/health/ready")
"""What is answered on connections that are too many."""
_SPARE, _MOST_LINGER = 64, 128
"""The most of these connections, and of those that are over and whose clients still send."""
_LOOK_FIRST, _LOOK_LATER = 0.05, 1.0
"""Seconds until it is looked whether a client that sends no more is gone: the first time, and at most between two times."""
_LARGE = 2**16
"""An answer of more bytes than these does not wait for its end to be sent."""
_SLOWEST = 1000
"""Bytes per second, on average over the read time-out. A client that takes its answer more slowly is ended."""
_QUIET, _LONGEST_LINGER = 5.0, 30.0
"""After an answer that came before the end of the request, the connection stays open until its client has sent nothing for so
many seconds, but no longer than so many. If it were closed while the client sends, the client would get a reset in place of the
answer."""

_REFUSALS = {
    408: ("Request Timeout", "the header of the request has not come in time (--read-timeout)."),
    429: ("Too Many Requests", "there are too many connections (--max-connections)."),
    431: ("Request Header Fields Too Large", f"the header or the trailers have more than {_MOST_HEADER_BYTES} bytes."),
}


class _RefusedError(Exception):
    """What a client sends is not taken; its connection knows why."""


class Places:
    """Which connections are there, and who gives way when one more comes than may be there.

    First goes who has been here longest without a whole header: idle ones, and those who send it bit by bit. Then goes who has
    been answered, and has sent no other request for the longest time. Who waits for an answer stays. If all do, the next ones
    are spare connections: they are asked for the health of the server only.

    Attributes:
        is_ending: Whether the server will end soon, so that connections are closed with their next answer.
    """

    def __init__(self) -> None:
        self.is_ending = False
        self._silent: dict[Any, None] = {}
        self._resting: dict[Any, None] = {}
        self._spare: dict[Any, None] = {}
        self._lingering: dict[Any, None] = {}

    @property
    def spare(self) -> int:
        """The number of spare connections."""
        return len(self._spare)

    def give_way(self) -> bool:
        """End the connection that goes first, and return whether there was one."""
        first = next(iter(self._silent), None) or next(iter(self._resting), None)
        if first is not None:
            first.give_way()
        return first is not None

    def silent(self, connection: Any) -> None:
        """A connection has no whole header yet."""
        if connection not in self._silent and connection not in self._spare:
            self._resting.pop(connection, None)
            self._silent[connection] = None

    def busy(self, connection: Any) -> None:
        """A connection waits for an answer."""
        self._silent.pop(connection, None)
        self._resting.pop(connection, None)

    def resting(self, connection: Any) -> None:
        """A connection has its answer."""
        if connection not in self._spare:
            self._resting[connection] = None

    def add_spare(self, connection: Any) -> None:
        """A connection is one too many."""
        self._spare[connection] = None
        if len(self._spare) > _SPARE:
            next(iter(self._spare)).give_way()

    def linger(self, connection: Any) -> None:
        """A connection is over, and its client may still send."""
        self._lingering[connection] = None
        if len(self._lingering) > _MOST_LINGER:
            next(iter(self._lingering)).give_way()

    def leave(self, connection: Any) -> None:
        """A connection is closed, or does not count any more."""
        for places in (self._silent, self._resting, self._spare, self._lingering):
            places.pop(connection, None)


class _Transport:
    """A transport that sends the header of an answer with its body, and that the connection closes in its own way.

    uvicorn writes the header and the body one after the other. In two packets they cost twice the system calls, and the client
    wakes up twice. So a small answer waits until it is complete.
    """

    def __init__(self, transport: asyncio.Transport, connection: Any) -> None:
        self._plain, self._connection = transport, connection
        self._held: list[bytes] = []
        self._written = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def write(self, data: bytes) -> None:
        self._held.append(data)
        if len(data) > _LARGE or not self._connection.is_answering():
            self.flush()

    def write_eof(self) -> None:
        self.flush()
        self._plain.write_eof()

    def is_lost(self) -> bool:
        return self._plain.is_closing()

    def is_closing(self) -> bool:
        return self._connection.is_over or self._plain.is_closing()

    def close(self) -> None:
        self.flush()
        if self._connection.may_send_more():
            self._connection.hang_up()
        else:
            self._connection.reader.watch()
            self._plain.close()

    def flush(self) -> None:
        if not self._held:
            return
        self._written += sum(map(len, self._held))
        if len(self._held[-1]) > _LARGE:
            self._plain.writelines(self._held)  # without a copy
        else:
            self._plain.write(b"".join(self._held))
        self._held.clear()

    def taken(self) -> int:
        """Return how many bytes of the answers the client's side has taken. The system's buffer is not the client's."""
        left = self._plain.get_write_buffer_size()
        return self._written - left - _sent_and_not_taken(self._plain.get_extra_info("socket"))


class _Reader:
    """The client as a reader of its answers. One that is slower than `_SLOWEST` is ended.

    Args:
        transport: Where the answers go.
        seconds: How long it is looked at, each time.
        metrics: Counts who is ended.
    """

    def __init__(self, transport: _Transport, seconds: float, metrics: ConnectionMetrics) -> None:
        self._transport, self._seconds, self._metrics = transport, seconds, metrics
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Look at it until it has taken what is there."""
        if self._timer is None and self._transport.get_write_buffer_size():
            self._taken = self._transport.taken()
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._look)

    def stop(self) -> None:
        """Look at it no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._transport.get_write_buffer_size() and self._transport.taken() - self._taken < _SLOWEST * self._seconds:
            self._metrics.ended("slow_reader")
            self._transport.abort()
        else:
            self.watch()


def _sent_and_not_taken(connection: Any) -> int:
    """Return how many bytes wait in the system's buffer of a socket. Where the system does not say it, it is 0."""
    try:
        found: int = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0]
    except (OSError, ValueError):
        return 0
    return found


def protocol_class(options: Options, metrics: ConnectionMetrics, places: Places) -> type[asyncio.Protocol]:
    """Return uvicorn's class for a connection with the limits of a server.

    Args:
        options: The settings.
        metrics: Counts the connections that are ended.
        places: Knows the connections.
    """
    base: Any = AutoHTTPProtocol

    class Connection(base):  # type: ignore[misc]
        """One connection of a client."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.is_over = self._is_nonsense = False
            self._header_timer: asyncio.TimerHandle | None = None
            self._header_bytes = 0
            self._field_bytes = self._silent_bytes = 0
            self._is_header = self._is_silent = self._is_spare = self._has_ended = False
            self._refusal: int | None = None
            self._gone: asyncio.Future[None] = self.loop.create_future()

        def connection_made(self, transport: asyncio.Transport) -> None:
            """Begin. If it is one too many, another one ends, or this one is for the health of the server only."""
            ours = _Transport(transport, self)
            self.reader = _Reader(ours, options.read_timeout, metrics)
            super().connection_made(ours)
            if len(self.connections) - places.spare > options.max_connections and not places.give_way():
                self._is_spare = True
                places.add_spare(self)
            places.silent(self)
            self._await_header()

        def data_received(self, data: bytes) -> None:
            """Read what has come. What comes after the end is dropped."""
            if self.is_over:
                self._heard = self.loop.time()
                return
            before, self._is_silent = self.cycle, True
            super().data_received(data)
            if self._is_silent:  # the parser keeps what is not complete, such as a trailer
                self._silent_bytes += len(data)
                if self._silent_bytes > _MOST_HEADER_BYTES:
                    self._refuse(431)
            if self.cycle is not before:
                self._header_is_here()
            elif before is None or before.response_complete:
                places.silent(self)
                self._header_bytes += len(data)
                if self._header_bytes > _MOST_HEADER_BYTES:
                    self._refuse(431)
                elif self._header_timer is None and not self.transport.is_closing():
                    self._await_header()

        def connection_lost(self, exc: Exception | None) -> None:
            """End."""
            self._header_is_here()
            self.reader.stop()
            places.leave(self)
            self.pipeline.clear()
            if self.cycle is not None:
                self.cycle.body = bytearray()  # nobody will read it
            if not self._gone.done():
                self._gone.set_result(None)
            super().connection_lost(exc)

        def eof_received(self) -> bool:
            """Keep the way back open for a client that sends no more, if its request is here; the answer ends it."""
            cycle = self.cycle
            self._has_ended = not (self.is_over or cycle is None or cycle.response_complete or cycle.more_body)
            if self._has_ended and self._is_waiting() and self.scope["http_version"] == "1.1":
                # A client that is gone sends the same. It answers whatever comes by a reset, and this may come at any time.
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                self.loop.call_later(_LOOK_FIRST, self._look_for_reset, _LOOK_FIRST)
            return self._has_ended

        def _is_waiting(self) -> bool:
            """Return whether there is one request, whose answer has not begun."""
            return not (self.pipeline or self.cycle.response_started or self.transport.is_closing())

        def _look_for_reset(self, pause: float) -> None:
            """End if the client is gone. After the end of what it sends, the event loop looks no more."""
            if not self._is_waiting():
                return
            poll = select.poll()
            poll.register(self.transport.get_extra_info("socket").fileno(), 0)  # that it is reset is always reported
            if poll.poll(0):
                self.transport.abort()
            else:
                pause = min(2 * pause, _LOOK_LATER)
                self.loop.call_later(pause, self._look_for_reset, pause)

        def on_message_begin(self) -> None:
            """Begin a request."""
            self._field_bytes, self._is_header = 0, True
            super().on_message_begin()
            self.scope["hvdlite.gone"] = self._gone

        def on_url(self, url: bytes) -> None:
            """Take a part of the request's first line."""
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            """Take a field of the header. A trailer, which comes after the body, is counted and dropped."""
            self._count(len(name) + len(value))
            if self._is_header:
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            """Begin to answer, if it is a version of HTTP in which requests have headers and answers have a status."""
            if self.parser.get_http_version() not in ("1.0", "1.1"):
                raise ValueError("expected HTTP/1.0 or HTTP/1.1")
            if self._is_spare and self.url.partition(b"?")[0] not in HEALTH:
                self._refusal = 429
                raise _RefusedError
            self._is_header = False
            places.busy(self)
            super().on_headers_complete()
            if self._is_spare or places.is_ending:
                self.cycle.keep_alive = False

        def on_chunk_header(self) -> None:
            """Note that a part of the body begins."""
            self._count(0)

        def on_body(self, body: bytes) -> None:
            """Take a part of the body."""
            self._count(0)
            super().on_body(body)

        def _count(self, size: int) -> None:
            """Note that something is complete, and count it if it is no body: however much comes, little of it is kept."""
            self._is_silent, self._silent_bytes = False, 0
            self._field_bytes += size
            if self._field_bytes > _MOST_HEADER_BYTES:
                self._refusal = 431
                raise _RefusedError

        def on_response_complete(self) -> None:
            """Send the answer, and go on."""
            self.transport.flush()
            super().on_response_complete()
            if not self.cycle.response_complete:
                return
            if self._has_ended:
                self.transport.close()
            elif not self.transport.is_closing():
                places.resting(self)

        def is_answering(self) -> bool:
            """Return whether an answer has begun, and is not complete."""
            return self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete

        def pause_writing(self) -> None:
            """Look at the client, which does not take its answer at once."""
            super().pause_writing()
            self.reader.watch()

        def timeout_keep_alive_handler(self) -> None:
            """End a connection that is not used any more. The time begins when the answer has gone to the system."""
            if self.transport.get_write_buffer_size():
                self.reader.watch()
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
            else:
                self.transport.close()

        def send_400_response(self, msg: str) -> None:
            """Answer what is no HTTP, or too long."""
            if self._refusal is not None:
                self._refuse(self._refusal)
                return
            self._is_nonsense = True
            super().send_400_response(msg)

        def may_send_more(self) -> bool:
            """Return whether the client may be in the middle of a request."""
            return self._is_nonsense or (self.cycle is not None and self.cycle.more_body)

        def hang_up(self) -> None:
            """Send no more. Drop what the client still sends, until it hangs up too or time is up."""
            if self.transport.is_lost():  # uvicorn closes once more what is closed
                return
            self.is_over = True
            self.connections.discard(self)  # it does not count, and nothing waits for it
            places.leave(self)
            places.linger(self)
            self._header_is_here()
            self.transport.resume_reading()
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._heard = self.loop.time()
            self._linger(self._heard + _LONGEST_LINGER)

        def give_way(self) -> None:
            """End, for another connection needs the place. What is left of its last answer still goes to the client."""
            end = self.transport.abort if self.is_over else self.transport.close
            self.is_over = True
            self.connections.discard(self)
            places.leave(self)
            metrics.ended("gave_way")
            end()

        def _linger(self, end: float) -> None:
            end_of_quiet = min(self._heard + _QUIET, end)
            if end_of_quiet <= self.loop.time():
                self.transport.abort()
            elif not self.transport.is_lost():
                self.loop.call_at(end_of_quiet, self._linger, end)

        def _await_header(self) -> None:
            self._header_timer = self.loop.call_later(options.read_timeout, self._refuse, 408)

        def _header_is_here(self) -> None:
            self._header_bytes = 0
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _refuse(self, status: int) -> None:
            if self.transport.is_closing():
                return
            cycle = self.cycle
            if (
                not self._is_header and cycle is not None
            ):  # it is about the end of a request that may be answered already
                is_answered = cycle.response_started
                if not cycle.response_complete:
                    cycle.disconnected = True
                    cycle.message_event.set()
                if is_answered:
                    self.hang_up()
                    return
            reason, text = _REFUSALS[status]
            body = f'{{"error": "{text}"}}'
            lines = [
                *(f"HTTP/1.1 {status} {reason}", "content-type: application/json", f"content-length: {len(body)}"),
                *("retry-after: 1", "connection: close", "", body),
            ]
            self.transport.write("\r\n".join(lines).encode())
            self.hang_up()

    return cast("type[asyncio.Protocol]", Connection)
