"""Draws the links between ranks as a picture of the matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from hvdlite.errors import ArgumentError
from hvdlite.tools.advise.link import NetworkLink
from hvdlite.tools.doctor.links import Pair


def check_plot() -> None:
    """Raise unless pictures can be drawn.

    Raises:
        ArgumentError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ArgumentError("--plot needs matplotlib: pip install matplotlib") from None


def plot(links: Mapping[Pair, NetworkLink], hosts: Sequence[str], path: Path) -> None:
    """Draw latency and bandwidth between ranks. The rows send, the columns receive; lines divide the hosts.

    Args:
        links: The links between ranks.
        hosts: For each rank, its host.
        path: The picture's file.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    ranks = sorted({rank for pair in links for rank in pair})
    labels = [f"{rank} ({hosts[rank]})" for rank in ranks]
    edges = [at - 0.5 for at in range(1, len(ranks)) if hosts[ranks[at]] != hosts[ranks[at - 1]]]
    side = max(3.2, 1.2 + 0.6 * len(ranks))
    picture, both = plt.subplots(1, 2, figsize=(2 * side + 2, side + 0.6), layout="constrained")
    shown: tuple[tuple[str, str, Callable[[NetworkLink], float]], ...] = (
        ("latency, µs", "viridis_r", lambda link: 1e6 * link.latency),
        ("bandwidth, Gbit/s", "viridis", lambda link: link.bits_per_second / 1e9),
    )
    for axes, (title, colors, value) in zip(both, shown, strict=True):
        table = np.full((len(ranks), len(ranks)), np.nan)
        for (one, other), link in links.items():
            table[ranks.index(one), ranks.index(other)] = value(link)
        low, high = np.nanmin(table), np.nanmax(table)
        image = axes.imshow(table, cmap=colors, norm=LogNorm(low, max(high, 1.01 * low)))
        for (row, column), each in np.ndenumerate(table):
            if not np.isnan(each):
                dark = image.norm(each) < 0.5 if colors == "viridis" else image.norm(each) > 0.5
                axes.text(
                    column, row, f"{each:.3g}", ha="center", va="center", fontsize=7, color="white" if dark else "black"
                )
        for edge in edges:
            axes.axhline(edge, color="#cc3311", linewidth=1)
            axes.axvline(edge, color="#cc3311", linewidth=1)
        axes.set_xticks(range(len(ranks)), labels, rotation=45, ha="right", fontsize=7)
        axes.set_yticks(range(len(ranks)), labels, fontsize=7)
        axes.set(title=title, xlabel="to rank", ylabel="from rank")
    picture.savefig(path, dpi=120)
    plt.close(picture)
