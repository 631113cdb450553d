"""A connection that a rank keeps to its launcher, to ask for something, and to hear later what comes of it.

This file imports only the standard library and link.py, by relative imports.
"""

from __future__ import annotations

import contextlib
import select
import threading

from .link import Address, connect
from .session import Message


class Line:
    """A connection of one rank to its launcher, which stays open. Any thread may use it.

    Args:
        address: The address of the launcher, and the job's secret.

    Raises:
        OSError: The launcher cannot be reached.
    """

    def __init__(self, address: Address) -> None:
        self._lock = threading.Lock()
        self._heard: list[Message] = []
        self._channel = connect(address)
        self._poll = select.poll()  # `select.select` takes no file descriptor above 1023
        self._poll.register(self._channel.fileno(), select.POLLIN)

    def ask(self, kind: str, **fields: object) -> None:
        """Send a message, and return when the launcher has taken it: it answers "ok".

        Raises:
            OSError: The launcher is gone, or it takes no such message from this rank.
        """
        with self._lock:
            self._channel.send(kind, b"", **fields)
            is_known = False
            while not is_known:
                for message in self._channel.receive():
                    if message.kind == "ok":
                        is_known = True
                    else:
                        self._heard.append(message)

    def tell(self, kind: str, **fields: object) -> None:
        """Send a message that has no answer. If the launcher is gone, nobody can be told."""
        with self._lock, contextlib.suppress(OSError):
            self._channel.send(kind, b"", **fields)

    def hear(self) -> list[Message]:
        """Return the messages that have come since the last call, but for answers. This does not wait.

        Raises:
            OSError: The launcher is gone.
        """
        with self._lock:
            while self._poll.poll(0):
                self._heard += self._channel.receive()
            heard, self._heard = self._heard, []
            return heard

    def wait(self) -> None:
        """Return when there may be something to hear, or when the connection has ended."""
        waiting = select.poll()  # an object of its own: no two threads may be in one
        waiting.register(self._channel.fileno(), select.POLLIN)
        waiting.poll()

    def hang_up(self) -> None:
        """End the connection for all threads that use it. Call `close` when none does any more."""
        self._channel.hang_up()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
