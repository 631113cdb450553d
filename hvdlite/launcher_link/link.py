"""The rank's end of the connection to its launcher. These control messages travel over it, see `hvdlite.launcher_link.session`:

    rank -> launcher   hello, output, done, failed, stopped, continued, stack, asked, exit, report, hung, where, fetch, result,
                       training, saved, elastic, committed, leaving, outlives, again, cannot, together, over, pulse
    launcher -> rank   end, taken, ok, function, stay, drop, lost, save, hosts, show, stack, generation

This file imports only the standard library and session.py, by a relative import: `worker.py` of the guards loads it on its own.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import sys
import time
from dataclasses import dataclass, field

from .session import Message, ProtocolError, Session, clip

CONNECT_SECONDS = 20.0
SILENT_SECONDS = 5
"""After about so many seconds without an answer of the other host a connection ends."""
UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}
"""The numbers of the errors of such a connection."""
_LAST_ACK = struct.Struct("@56xI")  # tcpi_last_ack_recv in Linux's struct tcp_info
_AGAIN_SECONDS = 0.1
_ACKNOWLEDGE_SECONDS = 5.0


@dataclass(frozen=True)
class Address:
    """The address at which the launcher listens, and the secret that it shares with its ranks."""

    host: str
    port: int
    secret: str = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``host:port:secret``, the value of ``HVDLITE_CONTROL``.

        Raises:
            ValueError: The text has another form. The error does not repeat the text, because it may hold a secret.
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
    """Raise ArgumentError unless `text`, the value of ``HVDLITE_CONTROL``, has the form ``host:port:secret``."""
    from ..errors import ArgumentError

    try:
        Address.parse(text)
    except ValueError as error:
        raise ArgumentError(str(error)) from None


class LauncherChannel:
    """A connection to the launcher. Its calls wait until they are done, or until the limit that `limit` sets.

    Args:
        stream: The connected socket.
        session: The rank's end of the session. Call `greet` first: it authenticates both ends.
    """

    def __init__(self, stream: socket.socket, session: Session) -> None:
        self._stream = stream
        self._session = session

    def fileno(self) -> int:
        """Return the socket's file descriptor, so that `select` can wait for messages."""
        return self._stream.fileno()

    def send(self, kind: str, payload: bytes = b"", **fields: object) -> None:
        """Send one message.

        Raises:
            OSError: The launcher is gone.
        """
        self._session.send(Message(kind, fields, payload))
        self._flush()

    def receive(self) -> list[Message]:
        """Wait for bytes, and return the messages that these bytes complete. The list may be empty.

        Raises:
            OSError: The launcher is gone, or the bytes do not come from it (`ProtocolError`).
        """
        data = self._stream.recv(self._session.receive_limit)
        if not data:
            raise ConnectionError("the launcher closed the connection")
        return self._session.receive(data)

    def limit(self, seconds: float | None) -> None:
        """Let no call wait for the launcher longer than `seconds`; None means for ever."""
        self._stream.settimeout(seconds)

    def finish(self) -> None:
        """Close the connection after the launcher has read everything and has closed its end.

        A plain close with unread bytes in this end's buffer would discard what this end has sent.
        """
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_WR)
            while self._stream.recv(1 << 16):
                pass
        self._stream.close()

    def detach(self) -> socket.socket:
        """Return the socket, for bytes that are no messages. All messages that were sent there must have been received."""
        return self._stream

    def hang_up(self) -> None:
        """Send and receive no more: a thread that waits for messages finds that the launcher is gone."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection at once."""
        self._stream.close()

    def greet(self) -> None:
        """Let both ends prove to each other that they know the job's secret.

        Raises:
            OSError: The other end closed the connection, or is not the launcher of this job (`ProtocolError`).
        """
        while not self._session.is_trusted:
            self.receive()
            self._flush()

    def _flush(self) -> None:
        self._stream.sendall(self._session.outgoing)
        self._session.outgoing.clear()


def connect(address: Address, seconds: float = CONNECT_SECONDS) -> LauncherChannel:
    """Connect to the launcher, and authenticate both ends.

    Args:
        address: The address of the launcher, and the job's secret.
        seconds: How long to try.

    Raises:
        OSError: The launcher cannot be reached, or another program listens there (`ProtocolError`).
    """
    deadline = time.monotonic() + seconds
    while True:
        left = max(_AGAIN_SECONDS, deadline - time.monotonic())
        stream = socket.create_connection((address.host, address.port), timeout=left)
        try:
            keep_alive(stream)
            channel = LauncherChannel(stream, Session(address.secret, is_launcher=False))
            channel.greet()
            stream.settimeout(None)
            return channel
        except ProtocolError:
            stream.close()
            raise
        except OSError:  # if too many unauthenticated connections are open, the launcher drops the oldest of them
            stream.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(_AGAIN_SECONDS)


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel find out within `SILENT_SECONDS` that the other host is gone. Also switch Nagle's algorithm off."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def end_if_unanswered(connection: socket.socket) -> None:
    """End a connection within `SILENT_SECONDS` also if the other host is lost while bytes are on their way there.

    The kernel asks the other host (see `keep_alive`) only if it waits for no answer of it. Call this only where the other end
    always reads: the kernel would also end a connection whose other end has no room for what is sent.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_SECONDS)


def seconds_of_silence(connection: socket.socket) -> float:
    """Return how long ago the other host has last answered; 0.0 if the kernel does not say that. `keep_alive` asks each 2 s."""
    if not sys.platform.startswith("linux"):
        return 0.0
    with contextlib.suppress(OSError, struct.error):
        milliseconds = _LAST_ACK.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK.size))[0]
        return float(milliseconds) / 1000
    return 0.0


def request(address: Address, message: Message, timeout: float | None = None) -> Message:
    """Send one message over a new connection, and return the launcher's answer.

    Args:
        address: The address of the launcher, and the job's secret.
        message: The message to send.
        timeout: Seconds for the connection, and again for each wait after it; None means 20 s for the connection, and then
            no limit.

    Raises:
        OSError: The launcher cannot be reached, closed the connection without an answer, or did not answer in time.
    """
    channel = connect(address, CONNECT_SECONDS if timeout is None else timeout)
    with contextlib.closing(channel):
        channel.limit(timeout)
        channel.send(message.kind, message.payload, **message.fields)
        while not (answers := channel.receive()):
            pass
        return answers[0]


def report_hung(address: str, rank: int, size: int, text: str) -> bool:
    """Tell the launcher that another rank hangs. The launcher ends that rank: it has failed, and not who waits for it.

    Args:
        address: The setting ``HVDLITE_CONTROL``, which names the launcher; empty if there is none.
        rank: The number that the launcher gave the rank that hangs.
        size: The number of ranks that wait for each other. A launcher whose job has more or fewer does not act.
        text: A description of the failure for the user.

    Returns:
        Whether a launcher acts on the report.
    """
    return _answer(address, Message("hung", {"rank": rank, "size": size, "text": clip(text)})) is not None


def stack_by_guard(address: str, rank: int, size: int) -> str:
    """Return the Python stacks of a rank that does not answer itself, as its guard makes it write them. It may be empty.

    Args:
        address: The setting ``HVDLITE_CONTROL``, which names the launcher; empty if there is none.
        rank: The number that the launcher gave the rank.
        size: The number of ranks, as for `report_hung`.
    """
    answer = _answer(address, Message("where", {"rank": rank, "size": size}))
    return "" if answer is None else str(answer.fields["text"])


def report_failure(address: str, rank: int, text: str, code: int) -> bool:
    """Tell the launcher why this job must end. The launcher then ends every rank.

    Args:
        address: The setting ``HVDLITE_CONTROL``, which names the launcher; empty if there is none.
        rank: The rank that reports.
        text: A description of the failure for the user. It is printed last, after all other output.
        code: The exit code that the job should have.

    Returns:
        Whether a launcher has received the report. It is False if there is no launcher (a plain ``mpirun`` started the
        program, or ``HVDLITE_CONTROL`` names none), or if the launcher does not answer any more.
    """
    return _answer(address, Message("report", {"rank": rank, "text": clip(text), "code": code})) is not None


def _answer(address: str, message: Message) -> Message | None:
    """Send one message, and return the answer; None if there is no launcher, or if it does not answer."""
    if not address:
        return None
    try:
        return request(Address.parse(address), message, _ACKNOWLEDGE_SECONDS)
    except (OSError, ValueError):
        return None
