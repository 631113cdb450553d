"""`Messages`: values of any structure from one rank of a pipeline to another.

What the values look like travels when it changes only. A send goes on while the program computes.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvdlite.comm.ordered.communicator import Communicator
from hvdlite.protocols import Array, Request

_AS_BEFORE, _NEW, _FAILED = range(3)


class Packed(NamedTuple):
    """Values as bytes.

    Attributes:
        described: What the values look like; it can be pickled.
        arrays: The bytes of the tensors: contiguous arrays of uint8. Nobody changes them until they have arrived.
    """

    described: Any
    arrays: Sequence[Array]


class ValueCodec(Protocol):
    """Converts the values of a framework."""

    def pack(self, values: Any) -> Packed:
        """Return values as bytes.

        Raises:
            UnsupportedTensorError: They cannot be sent.
        """
        ...

    def unpack(self, described: Any) -> tuple[Sequence[Array], Callable[[], Any]]:
        """Return arrays for the bytes of values, and a function that returns the values once the arrays are filled."""
        ...


class Received(NamedTuple):
    """A message that has arrived.

    Attributes:
        parts: The number that was sent with it.
        failed: Whether the sender has failed. Then there are no values.
        values: The values.
    """

    parts: int
    failed: bool
    values: Any


class Messages:
    """Sends and receives values, on one rank. Messages of one tag arrive in the order in which they were sent.

    Args:
        communicator: The ranks of the pipeline. Nobody else sends on it.
        codec: Converts values.
    """

    def __init__(self, communicator: Communicator, codec: ValueCodec) -> None:
        self._communicator, self._codec = communicator, codec
        self._sent: list[Request] = []
        self._own: dict[int, deque[tuple[Array, bytes, list[Array]]]] = {}
        """For each tag, the messages of this rank to itself."""
        self._told: dict[tuple[int, int], bytes] = {}
        """For each receiver and tag, what the values looked like that were sent last."""
        self._heard: dict[tuple[int, int], bytes] = {}
        self.pack = codec.pack

    def send(self, packed: Packed | None, parts: int, dest: int, tag: int) -> None:
        """Begin to send values; None says that this rank has failed. `parts` travels along."""
        self._sent = [request for request in self._sent if not request.test()]
        described = b"" if packed is None else pickle.dumps(packed.described)
        kind = _FAILED if packed is None else _NEW if self._told.get((dest, tag)) != described else _AS_BEFORE
        if kind is _NEW:
            self._told[dest, tag] = described
        head = np.array([kind, parts, len(described)], np.int64)
        arrays = [] if packed is None else [array for array in packed.arrays if array.size]
        if dest == self._communicator.rank:
            self._own.setdefault(tag, deque()).append((head, described, [array.copy() for array in arrays]))
            return
        texts: list[Array] = [np.frombuffer(described, np.uint8)] if kind is _NEW else []
        for array in [head, *texts, *arrays]:
            self._sent.append(self._communicator.isend(array, dest, tag))

    def receive(self, source: int, tag: int) -> Received:
        """Wait for what `source` has sent next, and return it."""
        own = self._own[tag].popleft() if source == self._communicator.rank else None
        head = np.empty(3, np.int64) if own is None else own[0]
        if own is None:
            self._wait_for(head, source, tag)
        kind, parts, length = head.tolist()
        if kind == _FAILED:
            return Received(parts, True, None)
        if own is not None:
            self._heard[source, tag] = own[1]
        elif kind == _NEW:
            text = np.empty(length, np.uint8)
            self._wait_for(text, source, tag)
            self._heard[source, tag] = text.tobytes()
        arrays, values = self._codec.unpack(pickle.loads(self._heard[source, tag]))
        arrays = [array for array in arrays if array.size]
        for number, array in enumerate(arrays):
            if own is None:
                self._wait_for(array, source, tag)
            else:
                array[:] = own[2][number]
        return Received(parts, False, values())

    def _wait_for(self, array: Array, source: int, tag: int) -> None:
        self._communicator.irecv(array, source, tag).wait()

    def break_off(self, what: str, error: BaseException) -> None:
        """See `Channel.break_off`."""
        self._communicator.channel.break_off(what, error)

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        for request in self._sent:
            request.wait()
        self._sent.clear()
