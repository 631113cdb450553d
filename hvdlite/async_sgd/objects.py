"""Objects that the ranks of a training send each other after a meeting, such as the optimizer's state."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterable
from typing import Any

import numpy as np

from hvdlite.async_sgd.messages import OBJECT
from hvdlite.errors import PeerLeftError
from hvdlite.protocols import Channel


def send(channel: Channel, value: Any, ranks: Iterable[int]) -> None:
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


def receive(channel: Channel, rank: int) -> Any:
    """Receive the object that a rank sends.

    Raises:
        HvdliteError: The rank has left the job, or the channel is closed.
    """
    size = np.empty(1, np.int64)
    channel.irecv(size, rank, OBJECT).wait()
    data = np.empty(size[0], np.uint8)
    channel.irecv(data, rank, OBJECT).wait()
    return pickle.loads(data.tobytes())
