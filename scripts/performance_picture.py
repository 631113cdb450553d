"""Draw docs/performance.svg of the steps in docs/figures.json.

python scripts/performance_picture.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

DOCS = Path(__file__).parent.parent / "docs"
DRAWN = {
    "hvdlite": ("hvdlite", "#3949ab"),
    "hvdlite shard": ("hvdlite, shard=True", "#7986cb"),
    "DDP, tuned": ("torch's DDP", "#a1887f"),
    "ZeRO, tuned": ("torch's ZeRO", "#6d4c41"),
}
"""What is drawn of each step, with its name and colour in the picture."""


def draw(panel: Axes, steps: dict[str, dict[str, float]], title: str, names: list[str]) -> None:
    """Draw the bars of some steps, next to each other for each model."""
    width = 0.86 / len(names)
    for number, key in enumerate(names):
        places = [place + (number - (len(names) - 1) / 2) * width for place in range(len(steps))]
        name, colour = DRAWN[key]
        drawn = panel.bar(places, [row[key] for row in steps.values()], width * 0.96, label=name, color=colour)
        panel.bar_label(drawn, fmt="%.2f", fontsize=12, padding=1)
    panel.axhline(1, color="#444", linewidth=1, linestyle="--", label="no exchange at all")
    panel.set_xticks(range(len(steps)), [name.replace(", ", ",\n") for name in steps], fontsize=12)
    panel.tick_params(axis="y", labelsize=12)
    panel.set_title(title, fontsize=14, loc="left")
    panel.set_ylim(0, 2.2)
    panel.legend(fontsize=12, ncols=4, loc="upper right", frameon=False)
    panel.spines[["top", "right"]].set_visible(False)


def main() -> None:
    figures = json.loads((DOCS / "figures.json").read_text())
    matplotlib.rcParams["svg.hashsalt"] = "hvdlite"  # the same file each time
    figure, (beside, sharded) = plt.subplots(2, figsize=(13, 9))
    title = "Time of a training step of two ranks ÷ the same step with no exchange (lower is better)"
    draw(beside, figures["steps"], title, ["hvdlite", "hvdlite shard", "DDP, tuned"])
    draw(
        sharded,
        figures["steps_small"],
        "Optimizers in shards, in another run, with small pages",
        ["hvdlite shard", "ZeRO, tuned"],
    )
    figure.tight_layout(h_pad=2)
    figure.savefig(DOCS / "performance.svg", metadata={"Date": None})
    print(f"{DOCS / 'performance.svg'}: {', '.join(figures['steps'])}")


if __name__ == "__main__":
    main()
