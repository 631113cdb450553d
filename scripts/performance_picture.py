"""Draw docs/performance.svg of the tables in docs/performance.md.

python scripts/performance_picture.py
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

DOCS = Path(__file__).parent.parent / "docs"
COLOURS = {"hvdlite": "#3949ab", "hvdlite shard": "#7986cb"}


def table(text: str, head: str) -> tuple[list[str], dict[str, list[float]]]:
    """The columns and the rows of numbers of the first table of `text` whose head contains `head`."""
    lines = text[text.index(head) :].splitlines()
    columns = [cell.strip() for cell in lines[0].strip(" |").split("|")]
    columns = columns[1:] if len(columns) > 1 and not head.startswith("| |") else columns
    rows: dict[str, list[float]] = {}
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip(" *") for cell in line.strip().strip("|").split("|"))
        if all(re.fullmatch(r"[\d.]+", cell) for cell in cells):
            rows[name] = [float(cell) for cell in cells]
    return columns, rows


def bars(panel: Axes, columns: list[str], rows: dict[str, list[float]], title: str) -> None:
    width = 0.8 / len(rows)
    greys = iter(["#bdbdbd", "#9e9e9e", "#757575", "#d7ccc8", "#a1887f"])
    for number, (name, values) in enumerate(rows.items()):
        places = [column + (number - (len(rows) - 1) / 2) * width for column in range(len(values))]
        drawn = panel.bar(places, values, width * 0.92, label=name, color=COLOURS.get(name) or next(greys))
        panel.bar_label(drawn, fmt="%.2f", fontsize=7)
    panel.axhline(1, color="#444", linewidth=0.8, linestyle="--")
    panel.set_xticks(range(len(columns)), columns)
    panel.set_title(title, fontsize=11)
    panel.legend(fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def main() -> None:
    text = (DOCS / "performance.md").read_text()
    columns, rows = table(text, "| | MLP, SGD momentum | MLP, Adam | GPT, AdamW |\n|---|---|---|---|\n| no exchange |")
    matplotlib.rcParams["svg.hashsalt"] = "hvdlite"  # the same file each time
    figure, panel = plt.subplots(figsize=(9, 4))
    bars(
        panel, columns, rows, "Time of a training step of two ranks ÷ the same step with no exchange (lower is better)"
    )
    figure.tight_layout()
    figure.savefig(DOCS / "performance.svg", metadata={"Date": None})
    print(f"{DOCS / 'performance.svg'}: {', '.join(rows)}")


if __name__ == "__main__":
    main()
