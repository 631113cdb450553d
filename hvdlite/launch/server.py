"""The launcher's end of the line: accepts the ranks' connections, and hands over what they say."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
from typing import Any

from hvdlite.control import Address, Decoder, Message, keep_alive


class Connection:
    """One connection, from a rank's guard or from a rank that asks or reports something itself."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.decoder = Decoder()
        self.trusted = False
        self.rank: int | None = None

    def send(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        """Send one message; a connection that broke meanwhile shows itself when it is read."""
        with contextlib.suppress(OSError):
            self.stream.sendall(Message(kind, fields, payload).encode())


class Server:
    """Listens for the ranks of one job.

    Args:
        host: The address of this machine that the ranks can reach.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=512)
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_hex(16))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)

    def watch(self, descriptor: int) -> None:
        """Have `poll` also return when this file descriptor can be read."""
        self._selector.register(descriptor, selectors.EVENT_READ, descriptor)

    def unwatch(self, descriptor: int) -> None:
        """Undo `watch`."""
        self._selector.unregister(descriptor)

    def poll(self, timeout: float) -> tuple[list[tuple[Connection, Message]], list[int]]:
        """Wait for something to happen, at most ``timeout`` seconds.

        Returns:
            What was said, in order of arrival (with a message "gone" where a connection ended),
            and the watched file descriptors that can be read.
        """
        messages: list[tuple[Connection, Message]] = []
        descriptors = []
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                self._accept()
            elif isinstance(key.data, Connection):
                messages += [(key.data, message) for message in self._receive(key.data)]
            else:
                descriptors.append(key.data)
        return messages, descriptors

    def close(self) -> None:
        """Close everything; guards take that as the order to end their ranks at once."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Connection):
                key.data.stream.close()
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        stream, _ = self._listener.accept()
        keep_alive(stream)
        self._selector.register(stream, selectors.EVENT_READ, Connection(stream))

    def _receive(self, connection: Connection) -> list[Message]:
        messages: list[Message] = []
        try:
            data = connection.stream.recv(1 << 20)
            for message in connection.decoder.feed(data):
                if not connection.trusted:
                    self._check(message)
                    connection.trusted = True
                messages.append(message)
        except (OSError, ValueError):  # reset by the other end, or a stranger who speaks something else
            data = b""
        if not data:
            self._selector.unregister(connection.stream)
            connection.stream.close()
            messages.append(Message("gone", {}))
        return messages

    def _check(self, message: Message) -> None:
        if not hmac.compare_digest(str(message.fields.get("token")), self.address.token):
            raise ValueError("a connection from outside this job")
