"""A picture of latency against load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvdlite.checks import require
from hvdlite.serving.bench.results import NAMES, Results


def plot(all_results: Sequence[Results], url: str, path: Path) -> None:
    """Draw the percentiles of the latency against what was answered each second, a point for each load.

    Args:
        all_results: What came of the loads, of one kind, in the order of their size.
        url: The server.
        path: The picture to write; the suffix says the format.

    Raises:
        MissingPackageError: matplotlib is not installed.
        OSError: The picture cannot be written.
    """
    require("matplotlib", "examples", "hvdlite serve-bench --plot")
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    picture = Figure(figsize=(8, 5), layout="constrained")
    axes = picture.subplots()
    rates = [each.throughput for each in all_results]
    percentiles = [each.percentiles() * 1e3 for each in all_results]
    for number, name in enumerate(NAMES):
        axes.plot(rates, [values[number] for values in percentiles], marker="o", label=name)
    for each, rate, values in zip(all_results, rates, percentiles, strict=True):
        failed = f"\n{each.failed} failed" if each.failed else ""
        axes.annotate(
            each.load + failed, (rate, values[-1]), textcoords="offset points", xytext=(0, 6), ha="center", size="small"
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())  # 100 in place of 10²
    axes.yaxis.set_minor_formatter(LogFormatter())  # and 20, 30, where all lies in one decade
    axes.set_xlabel("answered requests per second")
    axes.set_ylabel("latency in ms")
    axes.set_title(f"Latency against load: {url}")
    axes.margins(0.1, 0.15)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    picture.savefig(path)
