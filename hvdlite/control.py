"""The line between a rank and its launcher: how messages look, and the rank's end of it.

A message is one line of JSON, followed by ``size`` bytes of payload where it has that field. A
connection's first message carries the job's token.

    rank -> launcher   hello, output, done, failed, stopped, continued, exit, report, fetch, result
    launcher -> rank   end, ok, function

This file needs the standard library only, because `hvdlite.launch.worker` loads it on its own.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdlite.config import Config

CONNECT_SECONDS = 20.0
_ACKNOWLEDGE_SECONDS = 5.0


@dataclass(frozen=True)
class Address:
    """Where the launcher listens, and the secret that it expects first."""

    host: str
    port: int
    token: str

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``host:port:token``, the value of ``HVDLITE_CONTROL``.

        Raises:
            ValueError: The text is something else.
        """
        host, port, token = text.rsplit(":", 2)
        return cls(host, int(port), token)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}:{self.token}"


@dataclass(frozen=True)
class Message:
    """One message: what it is, its fields, and its payload (empty for most)."""

    kind: str
    fields: dict[str, Any]
    payload: bytes = b""

    def encode(self) -> bytes:
        """The bytes that travel."""
        return json.dumps({"kind": self.kind, **self.fields, "size": len(self.payload)}).encode() + b"\n" + self.payload


class Decoder:
    """Bytes in, messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0
        self._header: dict[str, Any] | None = None

    def feed(self, data: bytes) -> Iterator[Message]:
        """Take what was received, and give the messages that it completes.

        Raises:
            ValueError: The other end does not speak this protocol.
        """
        self._buffer += data
        while True:
            if self._header is None:
                end = self._buffer.find(b"\n", self._scanned)
                self._scanned = len(self._buffer)
                if end < 0:
                    return
                self._header = _header(bytes(self._buffer[:end]))
                del self._buffer[: end + 1]
                self._scanned = 0
            size = self._header["size"]
            if len(self._buffer) < size:
                return
            fields, self._header = self._header, None
            payload = bytes(self._buffer[:size])
            del self._buffer[:size]
            del fields["size"]
            yield Message(fields.pop("kind"), fields, payload)


def _header(line: bytes) -> dict[str, Any]:
    header = json.loads(line)
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
        raise ValueError("not a message of this protocol")
    if not isinstance(header.get("size"), int) or header["size"] < 0:
        raise ValueError("a message without its size")
    return header


def connect(address: Address) -> socket.socket:
    """Connect to the launcher.

    Raises:
        OSError: It cannot be reached.
    """
    connection = socket.create_connection((address.host, address.port), timeout=CONNECT_SECONDS)
    connection.settimeout(None)
    keep_alive(connection)
    return connection


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel find out within about 5 s that the other host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def request(address: Address, message: Message, timeout: float | None = None) -> Message:
    """Send one message over a connection of its own, and wait for the answer.

    Raises:
        OSError: The launcher cannot be reached, or closed the connection without an answer.
    """
    decoder = Decoder()
    with connect(address) as connection:
        connection.settimeout(timeout)
        connection.sendall(Message(message.kind, {"token": address.token, **message.fields}, message.payload).encode())
        while data := connection.recv(1 << 20):
            for answer in decoder.feed(data):
                return answer
    raise ConnectionError("the launcher closed the connection")


def report_failure(config: Config, rank: int, text: str, code: int) -> bool:
    """Tell the launcher why this job must end; it then ends every rank.

    Args:
        config: This process's settings; its ``control`` names the launcher.
        rank: The rank that reports.
        text: What happened, for the user; printed last, after everything else.
        code: The exit code that the job should have.

    Returns:
        Whether a launcher knows now. False where there is none (the program was started by
        a plain ``mpirun``) or it does not answer any more.
    """
    if not config.control:
        return False
    try:
        message = Message("report", {"rank": rank, "text": text, "code": code})
        request(Address.parse(config.control), message, _ACKNOWLEDGE_SECONDS)
    except OSError:
        return False
    return True
