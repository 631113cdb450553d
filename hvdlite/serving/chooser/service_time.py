"""The time that a replica takes for a batch, by its size, fitted to the batches it has served."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

KEPT_OF_EACH_SIZE = 64
HALF_LIFE = 128  # batches: one that is older by this number counts half as much
LEAST_WEIGHT = 0.02  # of a size that was not seen for long: what it told is better than a line drawn out to it
BATCHES_FOR_CORRECTION = (
    4.0  # this weight of observations moves the curve half the way from the line to what was observed
)
OCTAVES = 0.25  # how far along the logarithm of the batch size an observation corrects the line
PLACES = 64  # batch sizes at which the curve is computed; it is linear in between
HUBER = 1.345
SMALLEST_SPREAD = 0.01


@dataclass(frozen=True)
class ServiceTime:
    """The service time s(b) of batches of b requests, and how it varies.

    Attributes:
        seconds: The typical service time by batch size, from 0 (which has that of 1) to the largest. Shape (max_batch + 1,).
        fixed: The part of the fitted line that does not depend on the batch size, in seconds.
        per_request: The slope of the fitted line, in seconds.
        ratios: Observed times divided by the curve, in rising order, without the largest 1 %. Shape (n,).
        weights: How much each of them counts. Shape (n,); the sum is 1.
        batches: How many batches have been observed.
        sizes: The smallest and the largest batch size observed.
    """

    seconds: Floats
    fixed: float
    per_request: float
    ratios: Floats
    weights: Floats
    batches: int
    sizes: tuple[int, int]

    @property
    def mean_seconds(self) -> Floats:
        """The mean service time by batch size, in seconds. Shape (max_batch + 1,)."""
        return np.asarray(self.seconds * float(self.ratios @ self.weights))

    def capacity(self, replicas: int) -> float:
        """Return the largest rate that this number of replicas can serve, in requests per second."""
        sizes = np.arange(1, len(self.seconds))
        return replicas * float(np.max(sizes / self.mean_seconds[1:]))

    def draw_ratios(self, random: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        """Draw from the observed ratios to the curve, with their weights (a bootstrap of the residuals)."""
        steps = np.cumsum(self.weights)
        places = np.searchsorted(steps, random.random(shape) * steps[-1], side="right")
        return np.asarray(self.ratios[np.minimum(places, len(self.ratios) - 1)])


class ServiceTimes:
    """Observes batches, and fits s(b) to them.

    Every batch size keeps its last times, and newer ones count more. The median of each size is the observation, so that an
    outlier (a garbage collection, a first call that compiles) does not move it. A line c + d·b with c, d ≥ 0 is fitted to the
    medians by iteratively reweighted least squares of the relative error (Huber, "Robust Estimation of a Location Parameter",
    Annals of Mathematical Statistics 35, 1964). What the line leaves over is smoothed over log b by a kernel regression
    (Nadaraya, "On Estimating Regression", 1964; Watson, "Smooth Regression Analysis", 1964). So the curve is the line where
    nothing was observed, and goes through the medians where much was, also if the time has a step at some batch size.
    A larger batch never takes less time.

    Args:
        max_batch: The largest batch size.
    """

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._seen: dict[int, deque[tuple[int, float]]] = {}
        self._batches = 0

    def observe(self, batch_size: int, seconds: float) -> None:
        """Learn the service time of a batch."""
        self._batches += 1
        kept = self._seen.get(batch_size)
        if kept is None:
            kept = self._seen[batch_size] = deque(maxlen=KEPT_OF_EACH_SIZE)
        kept.append((self._batches, max(seconds, 1e-9)))

    def fit(self) -> ServiceTime | None:
        """Return s(b), or None if no batch has been observed."""
        if not self._seen:
            return None
        sizes = np.array(sorted(self._seen))
        observed = [np.array(self._seen[size]).T for size in sizes.tolist()]
        weights = [0.5 ** ((self._batches - numbers) / HALF_LIFE) for numbers, _ in observed]
        medians = np.array(
            [_weighted_median(times, weight) for (_, times), weight in zip(observed, weights, strict=True)]
        )
        of_size = np.maximum([weight.sum() for weight in weights], LEAST_WEIGHT)
        fixed, per_request = _line(sizes, medians, of_size)
        curve = self._curve(sizes, medians, of_size, fixed, per_request)
        ratios = np.concatenate([times / curve[size] for size, (_, times) in zip(sizes, observed, strict=True)])
        order = np.argsort(ratios)
        kept = order[: int(0.99 * (len(order) - 1)) + 1]
        of_ratio = np.concatenate(weights)[kept] + 1e-12
        return ServiceTime(
            *(curve, fixed, per_request, ratios[kept], of_ratio / of_ratio.sum(), self._batches),
            (int(sizes[0]), int(sizes[-1])),
        )

    def _curve(
        self, sizes: npt.NDArray[np.int_], medians: Floats, of_size: Floats, fixed: float, per_request: float
    ) -> Floats:
        """Return the fitted curve by batch size. Shape (max_batch + 1,)."""
        largest = max(self._max_batch, int(sizes[-1]))
        places = np.unique(np.geomspace(1, largest, PLACES).round())
        distances = (np.log2(places)[:, None] - np.log2(sizes)) / OCTAVES
        weights = np.exp(-0.5 * distances**2) * of_size
        left_over = np.log(medians / (fixed + per_request * sizes))
        correction = weights @ left_over / (weights.sum(1) + BATCHES_FOR_CORRECTION)
        every = np.maximum(np.arange(largest + 1), 1)
        curve = (fixed + per_request * every) * np.exp(np.interp(every, places, correction))
        return np.asarray(np.maximum.accumulate(curve))


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    steps = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(steps, steps[-1] / 2)]])


def _line(sizes: npt.NDArray[np.int_], medians: Floats, of_size: Floats) -> tuple[float, float]:
    """Fit c + d·b to medians by batch size with the least relative error, and return c, d ≥ 0.

    If one size alone was observed, half of its time counts as fixed. So waiting promises something, and what it brings is
    observed soon.
    """
    if len(sizes) == 1:
        return float(medians[0] / 2), float(medians[0] / 2 / sizes[0])
    constant, linear = 1 / medians, sizes / medians
    doubt = np.ones(len(sizes))
    for _ in range(4):
        fixed, per_request = _least_squares(constant, linear, of_size * doubt)
        error = np.abs(fixed * constant + per_request * linear - 1)
        spread = max(_weighted_median(error, of_size) / 0.6745, SMALLEST_SPREAD)
        doubt = np.minimum(1, HUBER * spread / np.maximum(error, 1e-12))
    return fixed, per_request


def _least_squares(constant: Floats, linear: Floats, weights: Floats) -> tuple[float, float]:
    """Minimize Σ w (c·constant + d·linear − 1)² over c, d ≥ 0."""
    aa, ab, bb = weights @ constant**2, weights @ (constant * linear), weights @ linear**2
    a, b = weights @ constant, weights @ linear
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        fixed, per_request = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if fixed >= 0 and per_request >= 0:
            return float(fixed), float(per_request)
        if per_request < 0:
            return float(a / aa), 0.0
    return 0.0, float(b / bb)
