"""The line between a rank and its launcher: the rank's end of it. `hvdlite.launcher_link.session` is what travels.

    rank -> launcher   hello, output, done, failed, stopped, continued, asked, exit, report, fetch, result
    launcher -> rank   end, taken, ok, function

This file needs the standard library only, because `hvdlite.worker.worker` loads it on its own; hence the relative import.
"""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass, field

from .session import Message, ProtocolError, Session, clip

CONNECT_SECONDS = 20.0
_AGAIN_SECONDS = 0.1
_ACKNOWLEDGE_SECONDS = 5.0


@dataclass(frozen=True)
class Address:
    """Where the launcher listens, and the secret that it shares with its ranks."""

    host: str
    port: int
    secret: str = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``host:port:secret``, the value of ``HVDLITE_CONTROL``.

        Raises:
            ValueError: The text is something else. The message does not repeat it, for it may hold a secret.
        """
        parts = text.rsplit(":", 2)
        if (
            len(parts) != 3
            or not all(parts)
            or not (parts[1].isdecimal() and len(parts[1]) < 6 and int(parts[1]) < 65536)
        ):
            raise ValueError("HVDLITE_CONTROL is not host:port:secret; only hvdliterun sets it, so unset it elsewhere.")
        return cls(parts[0], int(parts[1]), parts[2])

    def __str__(self) -> str:
        return f"{self.host}:{self.port}:{self.secret}"


def check_address(text: str) -> None:
    """Let the value of ``HVDLITE_CONTROL`` pass.

    Raises:
        ArgumentError: It does not name a launcher.
    """
    from ..errors import ArgumentError

    try:
        Address.parse(text)
    except ValueError as error:
        raise ArgumentError(str(error)) from None


class Channel:
    """A connection to the launcher, which both ends trust. Its calls wait."""

    def __init__(self, stream: socket.socket, session: Session) -> None:
        self._stream = stream
        self._session = session

    def fileno(self) -> int:
        """The socket's file descriptor, to wait for messages."""
        return self._stream.fileno()

    def send(self, kind: str, payload: bytes = b"", **fields: object) -> None:
        """Send one message.

        Raises:
            OSError: The launcher is gone.
        """
        self._session.send(Message(kind, fields, payload))
        self._flush()

    def receive(self) -> list[Message]:
        """Wait for bytes, and give the messages that they complete: perhaps none.

        Raises:
            OSError: The launcher is gone, or what came is not from it.
        """
        data = self._stream.recv(self._session.appetite)
        if not data:
            raise ConnectionError("the launcher closed the connection")
        return self._session.receive(data)

    def limit(self, seconds: float | None) -> None:
        """Let no call wait longer than this for the launcher; None: for ever."""
        self._stream.settimeout(seconds)

    def finish(self) -> None:
        """Leave once the launcher has read everything: it closes its end then. A close with words unread would lose ours."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_WR)
            while self._stream.recv(1 << 16):
                pass
        self._stream.close()

    def close(self) -> None:
        """Leave at once."""
        self._stream.close()

    def greet(self) -> None:
        """Have both ends show that they belong to the same job.

        Raises:
            OSError: The other end went away, or is not the launcher.
        """
        while not self._session.is_trusted:
            self.receive()
            self._flush()

    def _flush(self) -> None:
        self._stream.sendall(self._session.outgoing)
        self._session.outgoing.clear()


def connect(address: Address, seconds: float = CONNECT_SECONDS) -> Channel:
    """Connect to the launcher.

    Raises:
        OSError: It cannot be reached, or something else listens there.
    """
    deadline = time.monotonic() + seconds
    while True:
        left = max(_AGAIN_SECONDS, deadline - time.monotonic())
        stream = socket.create_connection((address.host, address.port), timeout=left)
        try:
            keep_alive(stream)
            channel = Channel(stream, Session(address.secret, is_launcher=False))
            channel.greet()
            stream.settimeout(None)
            return channel
        except ProtocolError:
            stream.close()
            raise
        except OSError:  # a launcher that strangers besiege hangs up on the oldest that has not shown who it is
            stream.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(_AGAIN_SECONDS)


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
    channel = connect(address, CONNECT_SECONDS if timeout is None else timeout)
    with contextlib.closing(channel):
        channel.limit(timeout)
        channel.send(message.kind, message.payload, **message.fields)
        while not (answers := channel.receive()):
            pass
        return answers[0]


def report_failure(address: str, rank: int, text: str, code: int) -> bool:
    """Tell the launcher why this job must end; it then ends every rank.

    Args:
        address: The setting ``HVDLITE_CONTROL``, which names the launcher; empty if there is none.
        rank: The rank that reports.
        text: What happened, for the user; printed last, after everything else.
        code: The exit code that the job should have.

    Returns:
        Whether a launcher knows now. False where there is none (the program was started by
        a plain ``mpirun``, or ``HVDLITE_CONTROL`` is no launcher's) or it does not answer any more.
    """
    if not address:
        return False
    try:
        message = Message("report", {"rank": rank, "text": clip(text), "code": code})
        request(Address.parse(address), message, _ACKNOWLEDGE_SECONDS)
    except (OSError, ValueError):
        return False
    return True
