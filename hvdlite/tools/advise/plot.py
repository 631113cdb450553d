"""Draws the time of a step of each strategy by the bandwidth of the link."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hvdlite.errors import ArgumentError
from hvdlite.tools.advise.link import DEFAULT_LATENCY, NetworkLink
from hvdlite.tools.advise.model import CostModel
from hvdlite.tools.advise.strategies import TrainingStrategy

_DECADES = 6.0, 11.0
_POINTS = 20
"""The picture has bandwidths from 10^6 to 10^11 bit/s, so many for each power of ten."""


def crossings(
    model: CostModel, strategies: Sequence[TrainingStrategy]
) -> list[tuple[float, TrainingStrategy, TrainingStrategy]]:
    """Return where another strategy becomes the fastest: the bandwidth in bit/s, the one before, and the one from there on.

    Args:
        model: Makes the estimates. The latency of its link is kept.
        strategies: The strategies to compare.
    """
    found = []
    grid = bandwidths()
    rate = _rate(model)
    rates = [{strategy: rate(strategy, bits) for strategy in strategies} for bits in grid]
    best = [max(each, key=each.__getitem__) for each in rates]
    for (low, before), (high, after) in itertools.pairwise(zip(grid, best, strict=True)):
        if before != after:
            for _ in range(30):
                middle = math.sqrt(low * high)
                low, high = (middle, high) if rate(before, middle) > rate(after, middle) else (low, middle)
            found.append((high, before, after))
    return found


def bandwidths() -> list[float]:
    """Return the bandwidths of the picture in bit/s."""
    first, last = _DECADES
    count = round((last - first) * _POINTS)
    return [10 ** (first + number / _POINTS) for number in range(count + 1)]


def _rate(model: CostModel) -> Callable[[TrainingStrategy, float], float]:
    link = model.cluster.link or NetworkLink(DEFAULT_LATENCY, 1.0)

    def rate(strategy: TrainingStrategy, bits: float) -> float:
        return model.with_link(replace(link, seconds_per_byte=8 / bits)).estimate(strategy).rate

    return rate


def plot(model: CostModel, strategies: Sequence[TrainingStrategy], path: Path) -> None:
    """Draw the time in which all ranks have used a batch each, by the bandwidth, with the points where the fastest one changes.

    Args:
        model: Makes the estimates.
        strategies: The strategies.
        path: The picture's file.

    Raises:
        ArgumentError: matplotlib is not installed, or there is one host only.
    """
    if model.cluster.link is None:
        raise ArgumentError("--plot draws the time by the bandwidth between hosts, and there is one host: give --link.")
    try:
        import matplotlib
    except ImportError:
        raise ArgumentError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    picture, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    rate, grid, ranks = _rate(model), bandwidths(), model.profile.ranks
    for number, strategy in enumerate(strategies):
        style = ("-", "--", ":")[number // 10 % 3]
        axes.plot(
            grid, [1e3 * ranks / rate(strategy, bits) for bits in grid], style, linewidth=1.3, label=str(strategy)
        )
    for bits, before, after in crossings(model, strategies):
        at = 1e3 * ranks / rate(after, bits)
        axes.plot(bits, at, "ko", markersize=4)
        axes.annotate(f"{before} → {after}", (bits, at), xytext=(3, -12), textcoords="offset points", fontsize=7)
    axes.axvline(model.cluster.link.bits_per_second, color="#777777", linestyle="--", linewidth=1)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="bandwidth between the hosts, bit/s",
        ylabel=f"time for {ranks} batches, ms",
        title=f"{ranks} ranks, {model.cluster.per_host} on each host",
    )
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, fontsize=8)
    picture.savefig(path, dpi=120)
    plt.close(picture)
