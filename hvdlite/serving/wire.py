"""What the processes of a server send each other: frames of a small pickled header and raw bytes, which nothing pickles.

A batch of arrays of one shape is one block of bytes. Other values are pickled with their arrays beside them (PEP 574).
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdlite.protocols import Array

Buffer = bytes | bytearray | memoryview
_LENGTHS = struct.Struct("<IQ")
"""The numbers of bytes of the header and of the rest."""

_SMALL = 2**14
"""An array of fewer bytes is copied sooner than a view of it is made."""


def frame(header: Any, buffers: Sequence[Buffer] = ()) -> list[Buffer]:
    """Return a frame in pieces, to be sent one after the other."""
    head = pickle.dumps(header, pickle.HIGHEST_PROTOCOL)
    return [_LENGTHS.pack(len(head), sum(len(buffer) for buffer in buffers)) + head, *buffers]


def pack(values: Sequence[Any] | Array) -> tuple[Any, list[Buffer]]:
    """Return how values of a batch travel: what the header says of them, and their bytes.

    Args:
        values: One for each request; in an array, its rows.
    """
    if isinstance(values, np.ndarray):
        return ("rows", values.dtype.str, values.shape), [_bytes_of(values)]
    first = values[0]
    if isinstance(first, np.ndarray) and all(
        isinstance(value, np.ndarray) and value.dtype == first.dtype and value.shape == first.shape for value in values
    ):
        return ("rows", first.dtype.str, (len(values), *first.shape)), [_bytes_of(value) for value in values]
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(list(values), 5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    return ("objects", len(text), [len(each) for each in raw]), [text, *raw]


def unpack(how: Any, data: bytearray) -> list[Any] | Array:
    """Return the values that `pack` took: rows as one array, which lies in `data`, others as a list."""
    if how[0] == "rows":
        _, dtype, shape = how
        rows: Array = np.ndarray(shape, dtype, data)
        return rows
    _, end, lengths = how
    whole = memoryview(data)
    buffers = []
    for length in lengths:
        buffers.append(whole[end : end + length])
        end += length
    values: list[Any] = pickle.loads(whole[: how[1]], buffers=buffers)
    return values


def _bytes_of(array: Array) -> Buffer:
    if array.nbytes < _SMALL:
        return array.tobytes()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def send(connection: socket.socket, pieces: Sequence[Buffer]) -> None:
    """Send a frame, and wait until it is sent."""
    for piece in pieces:
        connection.sendall(piece)


def receive(connection: socket.socket) -> tuple[Any, bytearray]:
    """Wait for a frame, and return its header and its bytes.

    Raises:
        EOFError: The other side is gone.
    """
    lengths = _LENGTHS.unpack(_exactly(connection, _LENGTHS.size))
    head, data = (_exactly(connection, length) for length in lengths)
    return pickle.loads(head), data


def _exactly(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return data


class Frames(asyncio.BufferedProtocol):
    """Receives frames in an event loop, each into memory of its own.

    Args:
        received: Called with the header and the bytes of each frame.
        ended: Called once, when the other side is gone.
    """

    def __init__(self, received: Callable[[Any, bytearray], None], ended: Callable[[], None]) -> None:
        self._received, self._ended = received, ended
        self._header: bytearray | None = None
        self._lengths: tuple[int, int] | None = None
        self._begin(_LENGTHS.size)

    def _begin(self, length: int) -> None:
        self._data, self._count = bytearray(length), 0

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for what comes next."""
        return memoryview(self._data)[self._count :]

    def buffer_updated(self, nbytes: int) -> None:
        """Go on after some bytes have come."""
        self._count += nbytes
        if self._count < len(self._data):
            return
        if self._lengths is None:
            self._lengths = _LENGTHS.unpack(self._data)
            self._begin(self._lengths[0])
        elif self._header is None:
            self._header = self._data
            self._begin(self._lengths[1])
            if not self._lengths[1]:
                self._finish()
        else:
            self._finish()

    def _finish(self) -> None:
        header, data = self._header, self._data
        self._lengths = self._header = None
        self._begin(_LENGTHS.size)
        assert header is not None
        self._received(pickle.loads(header), data)

    def connection_lost(self, error: Exception | None) -> None:
        """Tell that the other side is gone."""
        self._ended()
