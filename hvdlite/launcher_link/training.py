"""A rank's connection to its launcher during a training with a parameter server, on which it hears what it has asked for.

This file imports only the standard library and link.py, by relative imports.
"""

from __future__ import annotations

import contextlib
import select
import threading

from .link import Address, connect
from .session import Message


class TrainingLink:
    """A connection of one rank to its launcher. Any thread may use it.

    Args:
        address: The address of the launcher, and the job's secret.
        rank: The number of the rank.
        size: The number of ranks in the job.

    Raises:
        OSError: The launcher cannot be reached.
    """

    def __init__(self, address: Address, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._lock = threading.Lock()
        self._heard: list[Message] = []
        self._channel = connect(address)

    def ask(self, *, dispensable: bool, saves: bool) -> None:
        """Say what the launcher is to do if ranks fail, until this is called again. Return when it knows.

        Args:
            dispensable: To go on without this rank, if it is this one.
            saves: To let this rank save something before the others and it are ended.

        Raises:
            OSError: The launcher is gone, or the job has another number of ranks.
        """
        with self._lock:
            self._channel.send("training", rank=self._rank, size=self._size, dispensable=dispensable, saves=saves)
            is_known = False
            while not is_known:
                for message in self._channel.receive():
                    if message.kind == "ok":
                        is_known = True
                    else:
                        self._heard.append(message)

    def hear(self) -> list[Message]:
        """Return the messages "lost" and "save" that have come since the last call. This does not wait.

        Raises:
            OSError: The launcher is gone.
        """
        with self._lock:
            while select.select([self._channel.fileno()], [], [], 0)[0]:
                self._heard += self._channel.receive()
            heard, self._heard = self._heard, []
            return heard

    def tell_saved(self, text: str) -> None:
        """Tell the launcher that this rank has saved, or why it has not. The user gets this text in the end."""
        with self._lock, contextlib.suppress(OSError):  # if the launcher is gone, nobody can be told
            self._channel.send("saved", text=text)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
