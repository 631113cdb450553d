"""HTTP/1.1 connections that are kept. Requests are bytes that were made before, and llhttp reads the answers.

A client that measures must be cheaper than what it measures. h11 needs 35 µs of a core for a request and its answer, and httpx
more than ten times that. httptools, which is llhttp, needs less than 1 µs.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools

from hvdlite.errors import ArgumentError
from hvdlite.serving.bench.bodies import Bodies

Done = Callable[["Connection", "int | str"], None]
"""Called with the status of an answer, or with what has gone wrong."""


@dataclass(frozen=True)
class Target:
    """Where requests go.

    Attributes:
        url: The whole URL.
        host: The name of the host.
        port: The port.
        tls: Whether connections are encrypted.
        requests: Whole requests, as bytes, which are sent in turn.
    """

    url: str
    host: str
    port: int
    tls: bool
    requests: tuple[bytes, ...]


def target(url: str, bodies: Bodies, headers: Mapping[str, str]) -> Target:
    """Make requests for a URL. Without a path, they go to ``/v1/predict``.

    Raises:
        ArgumentError: The URL is none of HTTP.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise ArgumentError(f"{url!r}: expected a URL such as http://127.0.0.1:8000.")
    path = (parts.path if parts.path not in ("", "/") else "/v1/predict") + (f"?{parts.query}" if parts.query else "")
    lines = {"host": parts.netloc.rpartition("@")[2], "content-type": bodies.kind, **headers}
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    requests = tuple(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data for data in bodies.data)
    tls = parts.scheme == "https"
    whole = f"{parts.scheme}://{lines['host']}{path}"
    return Target(whole, parts.hostname, port or (443 if tls else 80), tls, requests)


class Connection(asyncio.Protocol):
    """One connection, with one request at a time.

    Attributes:
        is_open: Whether another request can be sent.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._done: Done | None = None

    @classmethod
    async def open(cls, to: Target) -> Connection:
        """Connect.

        Raises:
            OSError: Nobody listens.
        """
        context = ssl.create_default_context() if to.tls else None
        return (await asyncio.get_running_loop().create_connection(cls, to.host, to.port, ssl=context))[1]

    def send(self, request: bytes, done: Done) -> None:
        """Send a request, and call `done` when its answer is here, or will not come."""
        self._done = done
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)

    def close(self) -> None:
        """End the connection. Nobody is told of an answer that has not come."""
        self._done, self.is_open = None, False
        self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        self._transport, self.is_open = transport, True

    def data_received(self, data: bytes) -> None:
        """Read what has come."""
        if self._done is None:  # it answers what nobody has asked
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.is_open = False
            self._transport.abort()
            self._finish(f"no HTTP: {error}")

    def on_message_complete(self) -> None:
        """Learn from the parser that an answer is whole."""
        self.is_open = self._parser.should_keep_alive()
        if not self.is_open:
            self._transport.close()
        self._finish(self._parser.get_status_code())

    def connection_lost(self, error: Exception | None) -> None:
        """End."""
        self.is_open = False
        self._finish("connection lost")

    def _finish(self, outcome: int | str) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(self, outcome)
