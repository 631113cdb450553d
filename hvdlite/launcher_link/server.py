"""The launcher's end of the control connections: `ControlServer` accepts those of the ranks, and returns their messages.

Ranks use it too, to accept connections from ranks on other hosts (`hvdlite.comm.sockets`). Anybody can connect to its port. A
connection that has not shown that it belongs to the job is called a stranger. What a stranger sends is not parsed. Only 128
strangers may be connected at a time, and each for 10 s at most.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Iterable
from typing import Any

from .link import UNREACHABLE, Address, end_if_unanswered, keep_alive, seconds_of_silence
from .session import Message, ProtocolError, Session

STRANGERS = 128
"""The largest number of strangers that may be connected. When there are more, the oldest is dropped."""
STRANGER_SECONDS = 10.0
_ACCEPTED_AT_ONCE = 64
_DOUBTFUL_SECONDS = 3.0


class ControlConnection:
    """One connection, from the guard of a rank, or from a rank itself for one request.

    Attributes:
        stream: The socket, which does not block.
        session: Authenticates both ends, and makes bytes of messages and messages of bytes.
        rank: The rank whose guard has said hello over this connection; None before, and for other connections.
        peer: The address of the other end.
        is_local: The other end is on this machine.
        since: The time of the connection's start, as of `time.monotonic`.
    """

    def __init__(self, stream: socket.socket, session: Session, server: ControlServer) -> None:
        self.stream = stream
        self.session = session
        self.rank: int | None = None
        self.peer: str = stream.getpeername()[0]
        self.is_local = self.peer == stream.getsockname()[0]
        self.since = time.monotonic()
        self._server = server

    def send(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        """Send one message without waiting. If the connection is broken, `ControlServer.poll` finds that when it reads."""
        self.session.send(Message(kind, fields, payload))
        self.flush()

    def flush(self) -> None:
        """Send the bytes that the socket takes now. `ControlServer.poll` sends the rest as soon as the socket takes it."""
        with contextlib.suppress(OSError):
            sent = self.stream.send(self.session.outgoing)
            del self.session.outgoing[:sent]
        self._server.expect(self, writable=bool(self.session.outgoing))

    def belongs_to(self, rank: int) -> None:
        """Note that the guard of a rank has said hello. It always reads what is sent to it, unless its host is lost."""
        self.rank = rank
        end_if_unanswered(self.stream)

    @property
    def is_doubtful(self) -> bool:
        """Whether the other host has not answered for longer than it takes if it is there: the connection may end soon."""
        return seconds_of_silence(self.stream) > _DOUBTFUL_SECONDS

    def refuse(self) -> None:
        """Close the connection, because its message makes no sense."""
        self._server.drop(self)


def _listen(host: str, ports: Iterable[int]) -> socket.socket:
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    problem = OSError("there is no port to listen at")
    for port in ports:
        try:
            return socket.create_server((host, port), family=family, backlog=512, dualstack_ipv6=both)
        except OSError as error:
            problem = error
    raise problem


class ControlServer:
    """A `ControlServer` listens for the ranks of one job.

    Args:
        host: The address of this machine that the ranks can reach; empty for all addresses of this machine.
        ports: The ports to try, in this order; 0 is any free port.
        secret: The secret of the job; empty for a new one.

    Attributes:
        address: That address, the port, and the secret.
        dropped: How many strangers were dropped, because they did not know the secret, or were too slow or too many.

    Raises:
        OSError: No port is free.
    """

    def __init__(self, host: str, ports: Iterable[int] = (0,), secret: str = "") -> None:
        self._listener = _listen(host, ports)
        self._listener.setblocking(False)
        self.address = Address(host, self._listener.getsockname()[1], secret or secrets.token_hex(32))
        self.dropped = 0
        self._strangers: dict[ControlConnection, None] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)

    def watch(self, descriptor: int) -> None:
        """Make `poll` return this file descriptor too when it can be read."""
        self._selector.register(descriptor, selectors.EVENT_READ, descriptor)

    def unwatch(self, descriptor: int) -> None:
        """Undo `watch`."""
        self._selector.unregister(descriptor)

    def poll(self, timeout: float) -> tuple[list[tuple[ControlConnection, Message]], list[int]]:
        """Wait for messages or for a watched file descriptor, at most ``timeout`` seconds.

        Returns:
            The messages in order of arrival, and the watched file descriptors that can be read. When a connection of the job
            ends, there is a message "gone"; its field "closed" is false if the other host cannot be reached any more.
        """
        messages: list[tuple[ControlConnection, Message]] = []
        descriptors = []
        for key, events in self._selector.select(timeout):
            if key.data is None:
                self._accept()
            elif not isinstance(key.data, ControlConnection):
                descriptors.append(key.data)
            elif self._knows(key.data):
                if events & selectors.EVENT_WRITE:
                    key.data.flush()
                if events & selectors.EVENT_READ:
                    messages += [(key.data, message) for message in self._receive(key.data)]
        self._hang_up_on_strangers(time.monotonic() - STRANGER_SECONDS)
        return messages, descriptors

    def expect(self, connection: ControlConnection, writable: bool) -> None:
        """Make `poll` send what waits to be sent on this connection (if `writable`), or stop doing so."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writable else 0)
        if self._knows(connection) and self._selector.get_key(connection.stream).events != events:
            self._selector.modify(connection.stream, events, connection)

    def drop(self, connection: ControlConnection) -> None:
        """Close a connection. `poll` returns no more messages of it, nor a message "gone"."""
        if connection in self._strangers:
            del self._strangers[connection]
            self.dropped += 1
        self.release(connection).close()

    def release(self, connection: ControlConnection) -> socket.socket:
        """Return the socket of a connection, which does not block. The server has nothing to do with it any more."""
        if self._knows(connection):
            self._selector.unregister(connection.stream)
        return connection.stream

    def close(self) -> None:
        """Close the port and all connections. Guards take that as the order to end their ranks at once."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, ControlConnection):
                key.data.stream.close()
        self._selector.close()
        self._listener.close()

    def _knows(self, connection: ControlConnection) -> bool:
        descriptor = connection.stream.fileno()  # -1 if it was closed while others were listened to
        return descriptor >= 0 and descriptor in self._selector.get_map()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                stream, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # it went away meanwhile, or this process may open no more files
                self._hang_up_on_strangers(time.monotonic())
                return
            try:
                stream.setblocking(False)
                keep_alive(stream)
                connection = ControlConnection(stream, Session(self.address.secret, is_launcher=True), self)
            except OSError:
                stream.close()
                continue
            self._selector.register(stream, selectors.EVENT_READ, connection)
            self._strangers[connection] = None
            connection.flush()
            if len(self._strangers) > STRANGERS:
                self.drop(next(iter(self._strangers)))

    def _hang_up_on_strangers(self, since: float) -> None:
        """Drop the strangers that connected at the time `since` or before."""
        for stranger in list(self._strangers):
            if stranger.since > since:
                return
            self.drop(stranger)

    def _receive(self, connection: ControlConnection) -> list[Message]:
        session = connection.session
        was_trusted, messages, closed = session.is_trusted, [], True
        try:
            data = connection.stream.recv(session.receive_limit)
            if data:
                messages = session.receive(data)
        except BlockingIOError:
            return []
        except (OSError, ProtocolError) as error:  # it was reset, its host cannot be reached, or it is a stranger
            data, closed = b"", error.errno not in UNREACHABLE
        if not data:
            self.drop(connection)
            return [Message("gone", {"closed": closed})] if was_trusted else []
        if session.is_trusted and not was_trusted:
            del self._strangers[connection]
            connection.flush()
        return messages
