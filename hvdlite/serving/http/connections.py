"""What uvicorn does not do for connections: limits for their number and their headers, and ends that clients understand."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from hvdlite.serving.options import Options

_MOST_HEADER_BYTES = 2**16
_QUIET, _LONGEST_LINGER = 5.0, 30.0
"""After an answer that came before the end of the request, the connection stays open until its client has sent nothing for so
many seconds, but no longer than so many. If it were closed while the client sends, the client would get a reset in place of the
answer."""

_REFUSALS = {
    408: ("Request Timeout", "the header of the request has not come in time (--read-timeout)."),
    429: ("Too Many Requests", "there are too many connections (--max-connections)."),
    431: ("Request Header Fields Too Large", f"the header or the trailers have more than {_MOST_HEADER_BYTES} bytes."),
}


class _TooLongError(Exception):
    """What a client sends besides its body is too long."""


class _Transport:
    """A transport that sends the header of an answer with its body, and that the connection closes in its own way.

    uvicorn writes the header and the body one after the other. In two packets they cost twice the system calls, and the client
    wakes up twice. So an answer waits until it is complete; none is streamed.
    """

    def __init__(self, transport: asyncio.Transport, connection: Any) -> None:
        self._plain, self._connection = transport, connection
        self._held: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def write(self, data: bytes) -> None:
        self._held.append(data)
        if not self._connection.is_answering():
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
            self._plain.close()

    def flush(self) -> None:
        if self._held:
            self._plain.write(b"".join(self._held))
            self._held.clear()


def protocol_class(options: Options) -> type[asyncio.Protocol]:
    """Return uvicorn's class for a connection with the limits of a server.

    Args:
        options: The settings.
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
            self._is_header = self._is_silent = self._is_too_long = self._has_ended = False

        def connection_made(self, transport: asyncio.Transport) -> None:
            """Begin, or refuse one too many."""
            super().connection_made(_Transport(transport, self))
            if len(self.connections) > options.max_connections:
                self._refuse(429)
            else:
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
                self._header_bytes += len(data)
                if self._header_bytes > _MOST_HEADER_BYTES:
                    self._refuse(431)
                elif self._header_timer is None and not self.transport.is_closing():
                    self._await_header()

        def connection_lost(self, exc: Exception | None) -> None:
            """End."""
            self._header_is_here()
            super().connection_lost(exc)

        def eof_received(self) -> bool:
            """Keep the way back open for a client that sends no more, if its request is here; the answer ends it."""
            cycle = self.cycle
            self._has_ended = not (self.is_over or cycle is None or cycle.response_complete or cycle.more_body)
            return self._has_ended

        def on_message_begin(self) -> None:
            """Begin a request."""
            self._field_bytes, self._is_header = 0, True
            super().on_message_begin()

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
            self._is_header = False
            super().on_headers_complete()

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
                self._is_too_long = True
                raise _TooLongError

        def on_response_complete(self) -> None:
            """Send the answer, and go on."""
            self.transport.flush()
            super().on_response_complete()
            if self._has_ended and self.cycle.response_complete:
                self.transport.close()

        def is_answering(self) -> bool:
            """Return whether an answer has begun, and is not complete."""
            return self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete

        def timeout_keep_alive_handler(self) -> None:
            """End a connection that is not used any more, also if the client does not read its answer."""
            self.transport.abort()

        def send_400_response(self, msg: str) -> None:
            """Answer what is no HTTP, or too long."""
            if self._is_too_long:
                self._refuse(431)
                return
            self._is_nonsense = True
            super().send_400_response(msg)

        def may_send_more(self) -> bool:
            """Return whether the client may be in the middle of a request."""
            return self._is_nonsense or (self.cycle is not None and self.cycle.more_body)

        def hang_up(self) -> None:
            """Send no more. Drop what the client still sends, until it hangs up too or time is up."""
            self.is_over = True
            self.connections.discard(self)  # it does not count, and nothing waits for it
            self._header_is_here()
            self.transport.resume_reading()
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._heard = self.loop.time()
            self._linger(self._heard + _LONGEST_LINGER)

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
