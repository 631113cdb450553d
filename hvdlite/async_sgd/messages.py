"""Requests of a worker to a server, and the answers.

A request is a `WorkerRequest` with the tag `REQUEST`. After an early chunk comes the chunk, with the tag `BODY`. After a push
come, with this tag:

- the head: for each tensor whether there is a dense gradient, for each chunk whether it follows, and the settings;
- sparse gradients, if there are any (`rows`);
- the chunks that follow, those side by side in one message.

The answer to every other request is a `ServerAnswer` with the tag `ANSWER`, then with the tag `VALUES` the values of the part
(`ServerLayout.answers`), or the text of an error.

After a meeting, ranks send each other objects such as the optimizer's state: the size, then the pickle, with the tag `OBJECT`.
"""

from __future__ import annotations

import contextlib
import enum
import pickle
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from hvdlite.errors import PeerLeftError
from hvdlite.protocols import Array, Channel

REQUEST, BODY, ANSWER, VALUES, OBJECT = 1, 2, 3, 4, 5


class Purpose(enum.IntEnum):
    """What a rank asks of a server."""

    PUSH = 0
    """To step with its gradients."""
    SERVE = 1
    """To meet the workers for whatever they want. Ranks that only serve ask this."""
    PULL = 2
    """To meet all ranks. Then all have the same values. So it is with the purposes below."""
    STATE = 3
    """To collect the optimizer's state."""
    LOAD = 4
    """To give the servers another state."""
    FINISH = 5
    """To end the training."""
    EARLY = 6
    """To take a chunk of its next push before that. There is no answer."""
    LOST = 7
    """To go on without a worker that has failed. The server's own rank asks this; there is no answer."""

    @property
    def text(self) -> str:
        """The call of the program that has this purpose."""
        return {
            2: "synchronize()",
            3: "state_dict() (in Keras: synchronize(), or the end of fit)",
            4: "load_state_dict() (in Keras: restart())",
            5: "finish()",
        }.get(self, "")


class WorkerRequest(NamedTuple):
    """What a rank sends first.

    Attributes:
        purpose: A `Purpose`.
        number: For a push or an early chunk, how many pushes this worker has made before; for a loss, the worker.
        chunk: For an early chunk, its number.
        head: For a push, the bytes of its head.
        rows: For a push, the bytes of its sparse gradients.
        weight: For a push, the number of samples.
    """

    purpose: int
    number: int = 0
    chunk: int = 0
    head: int = 0
    rows: int = 0
    weight: float = 1.0

    def pack(self) -> Array:
        """Return the request as float64, in which all numbers below 2**53 are exact."""
        return np.array(self, np.float64)

    @classmethod
    def unpack(cls, data: Array) -> WorkerRequest:
        """Return the request that `pack` has packed."""
        *numbers, weight = data.tolist()
        purpose, number, chunk, head, rows = map(int, numbers)
        return cls(purpose, number, chunk, head, rows, weight)


class ServerAnswer(NamedTuple):
    """What a server answers first.

    Attributes:
        purpose: Of a meeting, what it was for; else `Purpose.PUSH`.
        error: The bytes of the error's text that follows; 0 if values follow.
        missed: For a push, how many pushes of others were applied since this worker got the values it has computed with.
    """

    purpose: int
    error: int = 0
    missed: int = 0

    def pack(self) -> Array:
        """Return the answer as int64."""
        return np.array(self, np.int64)

    @classmethod
    def unpack(cls, data: Array) -> ServerAnswer:
        """Return the answer that `pack` has packed."""
        return cls(*map(int, data))


def send_object(channel: Channel, value: Any, ranks: Iterable[int]) -> None:
    """Send an object that can be pickled to some ranks, and wait until they have it. A rank that is gone is left out.

    Raises:
        HvdliteError: The channel is closed.
    """
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    size = np.array([len(data)], np.int64)
    requests = [channel.isend(each, rank, OBJECT) for rank in ranks for each in (size, data)]
    for request in requests:
        with contextlib.suppress(PeerLeftError):
            request.wait()


def receive_object(channel: Channel, rank: int) -> Any:
    """Receive the object that a rank sends.

    Raises:
        HvdliteError: The rank has left the job, or the channel is closed.
    """
    size = np.empty(1, np.int64)
    channel.irecv(size, rank, OBJECT).wait()
    data = np.empty(size[0], np.uint8)
    channel.irecv(data, rank, OBJECT).wait()
    return pickle.loads(data.tobytes())
