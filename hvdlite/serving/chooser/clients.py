"""Clients that send their next request when they have the answer to the last one: whether all requests come from such, and how
many there are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

FEWEST, MOST = 2, 512  # clients; among more, nobody waits for the last one
FEWEST_ROUNDS = 20  # requests of each client
SHARE = 0.5


@dataclass(frozen=True)
class Clients:
    """A closed loop: each of these clients has one request here, or thinks.

    Attributes:
        count: How many there are.
        thinks: Times from an answer to the next request of a client, in seconds. Shape (n,), n ≥ 1.
    """

    count: int
    thinks: Floats

    @property
    def mean_think(self) -> float:
        """The mean time from an answer to the next request, in seconds."""
        return float(self.thinks.mean())


def clients_of(times: Floats, here: Counts, answer_times: Floats, answered: Counts) -> Clients | None:
    """Return the clients from which requests came, or None if they seem to come of their own accord.

    A fixed number of busy clients comes to the same most again and again: all of them are here. Independent requests do that
    once in a long time. The answers are matched with the requests in their order, which keeps the mean time between them,
    and tells as much of its distribution as can be known without the names of clients.

    Args:
        times: When requests came, in seconds. Shape (n,).
        here: For each of them, how many were here and not answered, with it. Shape (n,).
        answer_times: When batches were answered, in seconds. Shape (m,).
        answered: For each of them, how many requests had been answered, with it. Shape (m,).
    """
    count = int(here.max(initial=0))
    if not (len(answered) and FEWEST <= count <= MOST and len(times) >= FEWEST_ROUNDS * count):
        return None
    if (here == count).mean() < SHARE / count:
        return None
    batch = np.searchsorted(answer_times, times, side="right") - 1
    number = answered[batch] - (count - here)  # the first answer whose client has not sent again
    known = (batch >= 0) & (number > answered[0])
    if not known.any():
        return None
    thinks = times[known] - answer_times[np.searchsorted(answered, number[known])]
    return Clients(count, np.maximum(thinks, 0.0))
