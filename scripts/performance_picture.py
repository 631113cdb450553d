"""Draw docs/performance.svg of the table of steps in docs/performance.md.

python scripts/performance_picture.py
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

DOCS = Path(__file__).parent.parent / "docs"
HEAD = "| ÷ the tuned step |"
COLOURS = {"small pages": "#bdbdbd", "hvdlite": "#3949ab", "hvdlite shard": "#7986cb", "DDP, tuned": "#a1887f"}
"""The columns of the table that are drawn."""


def table(text: str) -> tuple[list[str], dict[str, list[str]]]:
    """Return the columns and the rows of the table of steps."""
    lines = itertools.takewhile(lambda line: line.startswith("|"), text[text.index(HEAD) :].splitlines())
    (_, *columns), _, *rows = [[cell.strip(" *") for cell in line.strip("| ").split("|")] for line in lines]
    return columns, {name: values for name, *values in rows}


def main() -> None:
    columns, rows = table((DOCS / "performance.md").read_text())
    matplotlib.rcParams["svg.hashsalt"] = "hvdlite"  # the same file each time
    figure, panel = plt.subplots(figsize=(12, 4.5))
    width = 0.8 / len(COLOURS)
    for number, (name, colour) in enumerate(COLOURS.items()):
        values = [float(row[columns.index(name)]) for row in rows.values()]
        places = [place + (number - (len(COLOURS) - 1) / 2) * width for place in range(len(values))]
        drawn = panel.bar(places, values, width * 0.92, label=name, color=colour)
        panel.bar_label(drawn, fmt="%.2f", fontsize=6)
    panel.axhline(1, color="#444", linewidth=0.8, linestyle="--")
    panel.set_xticks(range(len(rows)), [re.sub(", ", ",\n", name) for name in rows], fontsize=8)
    panel.set_title(
        "Time of a training step of two ranks ÷ the tuned step with no exchange (lower is better)", fontsize=11
    )
    panel.legend(fontsize=8, ncols=3)
    panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(DOCS / "performance.svg", metadata={"Date": None})
    print(f"{DOCS / 'performance.svg'}: {', '.join(rows)}")


if __name__ == "__main__":
    main()
