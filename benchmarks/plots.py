"""Draws figures as pictures. Below the line at 1, hvdlite is faster than the reference. The area above the line is tinted."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.plan import (
    ALONE,
    ALONE_SMALL,
    ALONE_TUNED,
    BUCKETS,
    DDP,
    DDP_TUNED,
    FLAT,
    GLOO,
    HOROVOD,
    HVDLITE,
    MEMCPY,
    MPI_HALF,
    MPI_OWN,
    MULTI_WORKER,
    OVERLAP,
    SHARD,
    TF_KERAS_ALONE,
    ZERO,
)
from benchmarks.report import size

Figure = Mapping[str, Any]

LOSS = "#fbe9e7"
COLOURS = {
    **{HVDLITE: "#1565c0", BUCKETS: "#00838f", SHARD: "#00838f"},
    **{"torch gloo": "#ef6c00", DDP: "#ef6c00", MPI_HALF: "#6a1b9a", FLAT: "#6a1b9a"},
    **{HOROVOD: "#2e7d32", MEMCPY: "#757575", ALONE: "#bdbdbd"},
    **{ALONE_TUNED: "#9e9e9e", ALONE_SMALL: "#cfd8dc", OVERLAP: "#90caf9", DDP_TUNED: "#ffb74d", ZERO: "#a1887f"},
    **{TF_KERAS_ALONE: "#9e9e9e", MULTI_WORKER: "#ef6c00"},
}
ALGORITHM_COLOURS = ("#64b5f6", "#ba68c8", "#a1887f", "#dce775", "#f06292")


def plot_allreduce(figures: Sequence[Figure], path: Path) -> None:
    """Draw the ratio of medians to MPI's Allreduce by size, in a panel for each number of ranks and kind of tensor."""
    all_ranks = list(dict.fromkeys(f["ranks"] for f in figures))
    kinds = list(dict.fromkeys(f["kind"] for f in figures))
    picture = plt.figure(figsize=(2 + 4 * len(kinds), 1.5 + 3.6 * len(all_ranks)), layout="constrained")
    panels = picture.subplots(len(all_ranks), len(kinds), sharey=True, squeeze=False)
    for row, ranks in zip(panels, all_ranks, strict=True):
        for panel, kind in zip(row, kinds, strict=True):
            _ratios_by_size(panel, [f for f in figures if (f["ranks"], f["kind"]) == (ranks, kind)])
            panel.set_title(f"{kind}, {ranks} ranks")
        row[0].set_ylim(min(f["ratio"] for f in figures) / 1.5, max(f["ratio"] for f in figures) * 1.5)  # all panels
        row[0].set_ylabel(f"time ÷ {MPI_OWN} Allreduce of float32")
    lines = {line.get_label(): line for panel in panels.flat for line in panel.get_lines()}
    lines = {label: line for label, line in lines.items() if not str(label).startswith("_")}
    picture.legend(list(lines.values()), [str(label) for label in lines], loc="outside lower center", ncols=7)
    picture.suptitle("Blocking allreduce in place: ratio of medians (tinted: slower than MPI)")
    picture.savefig(path, dpi=120)
    plt.close(picture)


def _ratios_by_size(panel: Axes, figures: Sequence[Figure]) -> None:
    spare = iter(ALGORITHM_COLOURS)
    sizes = list(dict.fromkeys(f["bytes"] for f in figures))
    for peer in dict.fromkeys(f["peer"] for f in figures):
        if peer == MPI_OWN:
            continue
        mine = [f for f in figures if f["peer"] == peer]
        named = peer not in COLOURS  # one algorithm of hvdlite: a thin line behind the others
        panel.plot(
            *([sizes.index(f["bytes"]) for f in mine], [f["ratio"] for f in mine]),
            color=COLOURS.get(peer) or next(spare),
            marker="" if named else "o",
            linestyle="--" if peer == MEMCPY else "-",
            linewidth=1 if named else 2,
            zorder=2 if named else 3,
            label=peer,
        )
    panel.set_xticks(range(len(sizes)), [size(nbytes) for nbytes in sizes])
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=30))
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.yaxis.set_minor_locator(NullLocator())
    panel.grid(alpha=0.3)
    panel.axhline(1, color="black", linewidth=1.2)
    panel.axhspan(1, 1e6, color=LOSS, zorder=0)


def plot_backend(figures: Sequence[Figure], steps: Sequence[Figure], path: Path) -> None:
    """Draw the ratio of medians to gloo: of each operation by size, and of the steps."""
    ours = [f for f in figures if f["backend"] != GLOO]
    sizes = list(dict.fromkeys(f["bytes"] for f in ours))
    picture, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4.5), width_ratios=(3, 1), sharey=True, layout="constrained"
    )
    for operation in dict.fromkeys(f["operation"] for f in ours):
        mine = [f for f in ours if f["operation"] == operation]
        left.plot([sizes.index(f["bytes"]) for f in mine], [f["ratio"] for f in mine], marker="o", label=operation)
    left.set_xticks(range(len(sizes)), [size(nbytes) for nbytes in sizes])
    left.set_ylabel("time over hvdlite ÷ time over gloo")
    left.legend()
    trained = [f for f in steps if f["backend"] != GLOO]
    right.bar([f["training"] for f in trained], [f["ratio"] for f in trained], color=COLOURS["hvdlite"])
    for panel, title in ((left, "operations"), (right, "steps")):
        panel.axhline(1, color="black", linewidth=1)
        panel.set_ylim(bottom=0)
        panel.set_title(title)
    picture.suptitle("torch.distributed: ratio of medians (below 1: faster than gloo)")
    picture.savefig(path, dpi=120)
    plt.close(picture)


def plot_steps(figures: Sequence[Figure], memory: Sequence[Figure], path: Path) -> None:
    """Draw the ratio of medians to the reference, and memory, as bars by workload and variant."""
    reference, wide = figures[0]["reference"], max(8, 3 * len({f["workload"] for f in figures}))
    picture = plt.figure(figsize=(1.9 * wide if memory else wide, 5.5), layout="constrained")
    times, *others = picture.subplots(1, 2 if memory else 1, squeeze=False)[0]
    _bars(times, {(f["workload"], f["variant"]): f["ratio"] for f in figures}, "{:.2f}")
    times.axhline(1, color="black", linewidth=1.2)
    times.axhspan(1, 1e3, color=LOSS, zorder=0)
    times.set_ylim(0, 1.12 * max(f["ratio"] for f in figures))
    times.set_ylabel(f"time of a step ÷ {reference}")
    times.set_title("Training step: ratio of medians (tinted: slower than training alone)")
    for sizes in others:
        _bars(sizes, {(m["workload"], m["variant"]): statistics.mean(m["kept"]) / 1e6 for m in memory}, "{:.0f}")
        sizes.set_ylabel("MB per rank")
        sizes.set_title("Weights, gradients, optimizer state, buckets; shared memory counts once")
    bars = {bar.get_label(): bar for bar in times.containers}
    picture.legend(list(bars.values()), [str(label) for label in bars], loc="outside lower center", ncols=len(bars))
    picture.savefig(path, dpi=120)
    plt.close(picture)


def _bars(panel: Axes, heights: Mapping[tuple[str, str], float], text: str) -> None:
    workloads = list(dict.fromkeys(name for name, _ in heights))
    variants = list(dict.fromkeys(variant for _, variant in heights))
    width = 0.85 / len(variants)
    for place, variant in enumerate(variants):
        there = [at for at, name in enumerate(workloads) if (name, variant) in heights]
        values = [heights[workloads[at], variant] for at in there]
        left = [at + (place - (len(variants) - 1) / 2) * width for at in there]
        bars = panel.bar(left, values, 0.92 * width, color=COLOURS[variant], label=variant, zorder=2)
        behind = {
            "facecolor": "white",
            "alpha": 0.7,
            "edgecolor": "none",
            "pad": 0.5,
        }  # for a label on the line at 1
        panel.bar_label(bars, [text.format(value) for value in values], padding=2, fontsize=9, bbox=behind, zorder=4)
    panel.set_xticks(range(len(workloads)), workloads)
    panel.grid(axis="y", alpha=0.3)
