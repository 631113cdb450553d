"""`RankConnections`: arrays over the connections of one group. One thread sends, while the caller's receives and sums."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Mapping
from queue import SimpleQueue

import numpy as np

from hvdlite.errors import CommunicationError, HvdliteError
from hvdlite.protocols import Array, Combine

CHUNK_BYTES = 2**18
"""So much is received and summed at a time: it stays in the cache of the core."""
_ALONE_SECONDS = 30.0
"""A connection ends if the other rank has failed. Whoever knows why (the launcher, or the watchdog) has so long to say it."""
_HEAD = struct.Struct("<QQ")
"""Before each array: its number on this connection, and its bytes."""


class ConnectionEnded(Exception):
    """The connection to a rank has ended."""


class Sending:
    """Arrays that the thread sends, one after the other.

    Attributes:
        over: Set when nothing of it is read any more.
        problem: Why the rest was not sent; None if all is well.
    """

    def __init__(self, queue: SimpleQueue[Item | None]) -> None:
        self._queue = queue
        self.over = threading.Event()
        self.problem: str | None = None

    def send(self, rank: int, data: Array) -> None:
        """Send `data` to a rank, after what was sent before. It must not be changed before the rank has received it."""
        self._queue.put((self, rank, data))

    def end(self) -> None:
        """Send no more."""
        self._queue.put((self, -1, None))


Item = tuple[Sending, int, "Array | None"]
Body = Callable[[Callable[[int, Array], None]], None]
"""What sends arrays by its argument, ``send(rank, data)``, and receives others by `RankConnections`."""


class RankConnections:
    """The connections of one rank to the others of a group. One thread at a time uses them, all ranks in the same order.

    Args:
        streams: The connection to each other rank.
        check: Raises if nobody shall wait any more.
    """

    def __init__(self, streams: Mapping[int, socket.socket], check: Callable[[], object]) -> None:
        self._streams, self._check = dict(streams), check
        self._received = dict.fromkeys(streams, 0)
        self._names = {rank: _name(stream) for rank, stream in streams.items()}
        self._ended: HvdliteError | None = None
        self._is_over = threading.Event()
        self._scratch = np.empty(CHUNK_BYTES, np.uint8)
        self._queue: SimpleQueue[Item | None] = SimpleQueue()
        self.close = weakref.finalize(self, self._queue.put, None)
        """Ends the thread, and closes the connections. No exchange may be under way."""
        self.close.atexit = False
        arguments = self._queue, self._streams, self._names
        threading.Thread(target=_send_all, args=arguments, name="hvdlite-send", daemon=True).start()

    def exchange(self, body: Body) -> None:
        """Call `body`, which sends and receives arrays. Nothing is read or written any more when this returns or raises.

        Raises:
            CommunicationError: A connection has ended, and nobody has said why.
            HvdliteError: `stop` was called with this error.
        """
        if self._ended is not None:
            raise type(self._ended)(str(self._ended))
        sending = Sending(self._queue)
        try:
            body(sending.send)
            sending.end()
            sending.over.wait()
            if sending.problem is not None:
                raise ConnectionEnded(sending.problem)
        except BaseException as error:
            if isinstance(error, ConnectionEnded):
                _shut_down(self._streams)
            else:
                self.stop(
                    CommunicationError(f"this rank has left an exchange between hosts in the middle ({error!r}).")
                )
            sending.end()
            sending.over.wait()
            if not isinstance(error, ConnectionEnded):
                raise
            self._wait_for_reason(str(error))

    def _wait_for_reason(self, problem: str) -> None:
        waited = 0.0
        while self._ended is None and waited < _ALONE_SECONDS:
            self._check()
            self._is_over.wait(0.1)
            waited += 0.1
        self.stop(
            CommunicationError(
                f"a connection between hosts has ended: {problem}. The other rank has failed, or the network between them. "
                "HVDLITE_BETWEEN_HOSTS=mpi does without these connections."
            )
        )
        assert self._ended is not None
        raise type(self._ended)(str(self._ended))

    def receive_into(self, rank: int, data: Array) -> None:
        """Receive an array from a rank."""
        self._expect(rank, data.nbytes)
        self._fill(rank, memoryview(data.view(np.uint8)))  # type: ignore[arg-type]

    def combine_into(self, rank: int, data: Array, combine: Combine) -> None:
        """Receive an array from a rank, and combine `data` with it, a chunk at a time."""
        self._expect(rank, data.nbytes)
        scratch = self._scratch.view(data.dtype)
        for start in range(0, data.size, scratch.size):
            part = data[start : start + scratch.size]
            other = scratch[: part.size]
            self._fill(rank, memoryview(other.view(np.uint8)))  # type: ignore[arg-type]
            combine(part, other)

    def _expect(self, rank: int, nbytes: int) -> None:
        head = bytearray(_HEAD.size)
        self._fill(rank, memoryview(head))
        number, there = _HEAD.unpack(head)
        if (number, there) != (self._received[rank], nbytes):
            raise CommunicationError(
                f"rank {rank} of the group has sent {there} bytes (message {number}) where this rank expects {nbytes} (message "
                f"{self._received[rank]}): the hosts are not in step. All ranks make the same calls in the same order."
            )
        self._received[rank] += 1

    def _fill(self, rank: int, into: memoryview) -> None:
        stream, got, size = self._streams[rank], 0, len(into)
        while got < size:
            try:
                more = stream.recv_into(into[got:], 0, socket.MSG_WAITALL)
            except OSError as error:
                raise ConnectionEnded(_text(self._names[rank], error)) from error
            if not more:
                raise ConnectionEnded(_text(self._names[rank], None))
            got += more

    def stop(self, error: HvdliteError) -> None:
        """End what is under way, and all that comes later, with `error`. Any thread may call this."""
        self._ended = self._ended or error
        self._is_over.set()
        _shut_down(self._streams)


def _name(stream: socket.socket) -> str:
    try:
        return str(stream.getpeername()[0]).removeprefix("::ffff:")
    except OSError:  # it has ended already
        return "another host"


def _text(name: str, error: Exception | None) -> str:
    if error is None:
        return f"to {name}: it was closed there"
    return f"to {name}: {(error.strerror if isinstance(error, OSError) else None) or error}"


def _send_all(queue: SimpleQueue[Item | None], streams: Mapping[int, socket.socket], names: Mapping[int, str]) -> None:
    """Send what is in the queue until a None comes. The thread of `RankConnections` runs this; it does not keep that alive."""
    sent = dict.fromkeys(streams, 0)
    while (item := queue.get()) is not None:
        sending, rank, data = item
        del item
        if data is None:
            sending.over.set()
        elif sending.problem is None:
            try:
                left = memoryview(data.view(np.uint8))  # type: ignore[arg-type]
                streams[rank].sendall(_HEAD.pack(sent[rank], len(left)), socket.MSG_MORE if left else 0)
                sent[rank] += 1
                streams[rank].sendall(left)
            except Exception as error:  # whatever it is, nobody waits for this thread in vain
                sending.problem = _text(names[rank], error)
                _shut_down(streams)  # the thread that receives may wait for another rank
        sending, data = None, None  # type: ignore[assignment]  # what it has sent is kept alive no longer
    for each in streams.values():
        each.close()


def _shut_down(streams: Mapping[int, socket.socket]) -> None:
    for stream in streams.values():
        with contextlib.suppress(OSError):
            stream.shutdown(socket.SHUT_RDWR)
