"""When requests came lately, how far back that tells about now, and more arrivals of the same kind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvdlite.serving.chooser.clients import Clients, clients_of

Floats = npt.NDArray[np.float64]

KEPT = 1 << 16
OLDEST = 60.0  # seconds
SHORTEST = 0.5  # seconds
FEWEST = 16  # arrivals in the window
BINS = 16
MOST_KINDS = 24
UNLIKELY = 4.0  # standard deviations


@dataclass(frozen=True)
class Arrivals:
    """Arrivals of one kind.

    Attributes:
        gaps: The times between them, in seconds. Shape (n,), n ≥ 1.
        rate: Requests per second.
        seconds: The length of the window in which they came.
        dispersion: The variance of the number of arrivals in a sixteenth of the window divided by its mean: about 1 for a
            Poisson process, and more for bursts.
        clients: Who sends the requests, if they are clients that wait for their answers; None if they come of their own accord,
            or cannot all share a batch.
        kinds: For the request after each gap, the number of its key: 0 for the most frequent. Requests of different keys do not
            share a batch. Shape (n,); None if all may share one.
    """

    gaps: Floats
    rate: float
    seconds: float
    dispersion: float
    clients: Clients | None = None
    kinds: npt.NDArray[np.int64] | None = None

    @property
    def shares(self) -> Floats:
        """The part of the requests that each key has, in falling order. Shape (keys,)."""
        return np.ones(1) if self.kinds is None else np.bincount(self.kinds) / len(self.kinds)

    def streams(
        self, random: np.random.Generator, count: int, length: int
    ) -> tuple[Floats, npt.NDArray[np.int64] | None]:
        """Return streams of arrivals of this kind: those that came, in pieces, if they are enough, else drawn from them.

        A third of what was asked for is enough: then the streams are shorter. Drawn streams keep the bursts and the rate. They
        are made by the stationary bootstrap: blocks of consecutive gaps, with lengths of a geometric distribution, follow each
        other (Politis and Romano, "The Stationary Bootstrap", Journal of the American Statistical Association 89, 1994).

        Args:
            random: Where chance comes from.
            count: The number of streams.
            length: The number of arrivals in each.

        Returns:
            Times in seconds, which rise along each stream. Shape (count, length), or fewer columns. And the numbers of their
            keys, of the same shape; None if all may share a batch.
        """
        if 3 * len(self.gaps) >= count * length:
            length = min(length, len(self.gaps) // count)
            places = np.arange(-count * length, 0).reshape(count, length)
        else:
            places = self._drawn(random, count, length)
        times = np.cumsum(self.gaps[places], axis=1)
        times = np.asarray(times / (self.rate * max(float(self.gaps.mean()), 1e-12)))
        return times, None if self.kinds is None else self.kinds[places]

    def _drawn(self, random: np.random.Generator, count: int, length: int) -> npt.NDArray[np.intp]:
        """Draw places in the gaps by the stationary bootstrap. Shape (count, length)."""
        mean_block = min(max(len(self.gaps) / 8, 16), 1024)
        begins = random.random((count, length)) < 1 / mean_block
        begins[:, 0] = True
        numbers = np.arange(length)
        since = numbers - np.maximum.accumulate(np.where(begins, numbers, 0), axis=1)
        starts = random.integers(0, len(self.gaps), (count, length))
        of_block = np.take_along_axis(starts, numbers - since, axis=1)
        return np.asarray((of_block + since) % len(self.gaps))


class RecentArrivals:
    """Remembers when requests came, and finds since when they have come at the present rate.

    The window begins with the last half second. It doubles for as long as its older half has as many arrivals as the newer one,
    up to what bursts explain, and has 16 arrivals at least (as in Bifet and Gavaldà, "Learning from Time-Changing Data with
    Adaptive Windowing", 2007). So a steady load is known precisely, and a jump is known after as many arrivals as make it
    unlikely to be chance.
    """

    def __init__(self) -> None:
        self._times, self._here = np.empty(0), np.empty(0, np.int64)
        self._keys = np.empty(0, np.int64)
        self._answer_times, self._answered = np.empty(0), np.empty(0, np.int64)

    def add(self, times: Floats, here: Floats, keys: Floats) -> None:
        """Remember arrivals: when, as one of how many that are not answered, and the numbers of their keys. Shapes (n,)."""
        self._keys = np.concatenate([self._keys, keys.astype(np.int64)])[-KEPT:]
        self._times = np.concatenate([self._times, times])[-KEPT:]
        self._here = np.concatenate([self._here, here.astype(np.int64)])[-KEPT:]

    def answered(self, times: Floats, sizes: Floats) -> None:
        """Remember when batches were answered, and how large they were. Shapes (n,)."""
        before = self._answered[-1] if len(self._answered) else 0
        self._answer_times = np.concatenate([self._answer_times, times])[-KEPT:]
        self._answered = np.concatenate([self._answered, before + np.cumsum(sizes).astype(np.int64)])[-KEPT:]

    def window(self, now: float) -> Arrivals | None:
        """Return what the arrivals up to now tell about the present, or None if there were too few."""
        recent = int(np.searchsorted(self._times, now - OLDEST))
        times, here = self._times[recent:], self._here[recent:]
        if len(times) < FEWEST:
            return None
        oldest = now - float(times[0])
        length = SHORTEST
        while 2 * length <= oldest and _alike(times, now, length):
            length *= 2
        if 2 * length > oldest and _alike(times, now, oldest / 2):
            length = oldest
        length = max(length, now - float(times[-FEWEST]))
        begin = int(np.searchsorted(times, now - length))
        inside = times[begin:]
        counts = np.histogram(inside, BINS, (now - length, now))[0]
        clients = clients_of(inside, here[begin:], self._answer_times, self._answered)
        dispersion = float(counts.var() / counts.mean())
        kinds = _by_share(self._keys[recent:][begin:][1:])
        return Arrivals(
            *(np.diff(inside), len(inside) / length, length, dispersion), clients if kinds is None else None, kinds
        )


def _by_share(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """Number keys anew, the most frequent first; None if there is one only. Of too many, the rare ones share numbers."""
    _, number, counts = np.unique(keys, return_inverse=True, return_counts=True)
    if len(counts) == 1:
        return None
    place = np.empty(len(counts), np.int64)
    place[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    place = np.where(place < MOST_KINDS, place, MOST_KINDS // 2 + place % (MOST_KINDS - MOST_KINDS // 2))
    return np.asarray(place[number])


def _alike(times: Floats, now: float, length: float) -> bool:
    """Whether the number of arrivals in the last `length` seconds, and in as many before, differ by chance only."""
    edges = np.searchsorted(times, now - length * np.linspace(2, 0, 2 * BINS + 1), side="right")
    older, newer = np.diff(edges).reshape(2, BINS)
    together = older.sum() + newer.sum()
    dispersion = max(
        1.0, float((older.var() + newer.var()) / max(older.mean() + newer.mean(), 1e-12)) * BINS / (BINS - 1)
    )
    return bool(abs(newer.sum() - older.sum()) <= UNLIKELY * np.sqrt(dispersion * together))
