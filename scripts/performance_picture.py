"""Draw docs/performance.svg of the steps in docs/figures.json.

python scripts/performance_picture.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

DOCS = Path(__file__).parent.parent / "docs"
DRAWN = {
    "hvdlite": ("hvdlite", "#3949ab"),
    "hvdlite shard": ("hvdlite, shard=True", "#7986cb"),
    "DDP, tuned": ("torch's DDP", "#a1887f"),
}
"""What is drawn of each step, with its name and colour in the picture."""


def main() -> None:
    steps = json.loads((DOCS / "figures.json").read_text())["steps"]
    matplotlib.rcParams["svg.hashsalt"] = "hvdlite"  # the same file each time
    figure, panel = plt.subplots(figsize=(10, 4.5))
    width = 0.84 / len(DRAWN)
    for number, (key, (name, colour)) in enumerate(DRAWN.items()):
        places = [place + (number - (len(DRAWN) - 1) / 2) * width for place in range(len(steps))]
        drawn = panel.bar(places, [row[key] for row in steps.values()], width * 0.94, label=name, color=colour)
        panel.bar_label(drawn, fmt="%.2f", fontsize=8)
    panel.axhline(1, color="#444", linewidth=0.8, linestyle="--", label="no exchange at all")
    panel.set_xticks(range(len(steps)), [name.replace(", ", ",\n") for name in steps], fontsize=9)
    panel.set_title(
        "Time of a training step of two ranks ÷ the same step with no exchange (lower is better)", fontsize=12
    )
    panel.set_ylim(0, 2)
    panel.legend(fontsize=10, ncols=4, loc="upper right", frameon=False)
    panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(DOCS / "performance.svg", metadata={"Date": None})
    print(f"{DOCS / 'performance.svg'}: {', '.join(steps)}")


if __name__ == "__main__":
    main()
