"""Requests of a worker to a server, and the answers.

A request is a `Request` with the tag `REQUEST`; after a push come, with the tag `BODY`, which tensors are present and the
settings in one message, and the gradients in another if any is present. The answer to every request is an `Answer` with the tag
`ANSWER`, then with the tag `VALUES` the values of the part, or the text of an error.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np

from hvdlite.protocols import Array

REQUEST, BODY, ANSWER, VALUES = 1, 2, 3, 4


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

    @property
    def text(self) -> str:
        """The call of the program that has this purpose."""
        return {2: "synchronize()", 3: "state_dict()", 4: "load_state_dict()", 5: "finish()"}.get(self, "")


class Request(NamedTuple):
    """What a rank sends first.

    Attributes:
        purpose: A `Purpose`.
        number: For a push, how many this worker has made before.
        head: For a push, the bytes of the first message of its body.
        has_gradients: For a push, whether gradients follow.
        weight: For a push, the number of samples.
    """

    purpose: int
    number: int = 0
    head: int = 0
    has_gradients: bool = False
    weight: float = 1.0

    def pack(self) -> Array:
        """Return the request as float64, in which all numbers below 2**53 are exact."""
        return np.array(self, np.float64)

    @classmethod
    def unpack(cls, data: Array) -> Request:
        """Return the request that `pack` has packed."""
        purpose, number, head, has_gradients, weight = data.tolist()
        return cls(int(purpose), int(number), int(head), bool(has_gradients), weight)


class Answer(NamedTuple):
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
    def unpack(cls, data: Array) -> Answer:
        """Return the answer that `pack` has packed."""
        return cls(*map(int, data))
