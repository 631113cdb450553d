"""Place the figures of docs/figures.json on the pages, between `<!-- figure NAME -->` and `<!-- end -->`.

python scripts/figures.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
PLACE = re.compile(r"(<!-- figure (\w+) -->).*?(<!-- end -->)", re.DOTALL)
IN_README = ("wide MLP, AdamW", "ResNet-18, SGD momentum", "LSTM, Adam", "300 small layers, Adam", "BERT size, AdamW")


def _range(values: Iterable[float], form: str = "{:.2f}") -> str:
    ordered = sorted(values)
    return f"{form.format(ordered[0])} to {form.format(ordered[-1])}"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return (
        "\n".join(["", *(f"| {' | '.join(line)} |" for line in lines), ""])
        .replace("| --- |", "|---|")
        .replace(" --- |", "---|")
    )


def _steps(steps: dict[str, dict[str, Any]], head: str) -> str:
    columns = [name for name in next(iter(steps.values())) if name != "tuned_ms"]
    rows = [
        [model, f"{row['tuned_ms']} ms"] + ["–" if row[name] is None else f"{row[name]:.2f}" for name in columns]
        for model, row in steps.items()
    ]
    return _table([head, "tuned", *columns], rows)


def texts(figures: dict[str, Any]) -> dict[str, str]:
    """Return what stands on the pages, by the name of the place."""
    steps, to_ddp, keras = figures["steps"], figures["to_ddp"], figures["keras"]
    rows = [*steps.values(), *figures["steps_again"].values()]
    short = [next(name for name in to_ddp["hvdlite"] if model.startswith(name)) for model in IN_README]
    ddp = {way: [value for values in found.values() for value in values] for way, found in to_ddp.items()}
    return {
        "loss": _range((100 * (row["hvdlite"] - 1) for row in rows), "{:.0f}") + " %",
        "sharded": _range(row["hvdlite shard"] for row in rows),
        "ddp": _range(ddp["hvdlite"]),
        "ddp_sharded": _range(ddp["hvdlite shard"]),
        "keras": _range(keras["hvdlite"]),
        "keras_sharded": _range(keras["hvdlite shard"]),
        "multiworker": _range(keras["MultiWorkerMirroredStrategy"]),
        "keras_fit": _table(
            ["ratio of medians to no exchange, 2026-11-25", "SGD momentum", "Adam"],
            [
                ["no exchange", *(f"{value} ms" for value in keras["no exchange, ms"])],
                *(
                    [way, *(f"{value:.2f}" for value in keras[name])]
                    for way, name in (
                        ("hvdlite: `fit` with `DistributedOptimizer`", "hvdlite"),
                        ("hvdlite: the same with `shard=True`", "hvdlite shard"),
                        ("tf_keras, no exchange", "tf_keras, no exchange"),
                        ("tf_keras, MultiWorkerMirroredStrategy", "MultiWorkerMirroredStrategy"),
                    )
                ),
            ],
        ),
        "call": _range(figures["call_us"], "{}") + " µs",
        "negotiation": f"{figures['negotiation_us']} µs",
        "gloo": _range(figures["gloo_us"], "{}") + " µs",
        "steps": _steps(steps, "÷ the tuned step"),
        "steps_again": _steps(figures["steps_again"], "÷ the tuned step, another run"),
        "steps_small": _steps(figures["steps_small"], "÷ tuned, small pages"),
        "to_ddp": _table(
            ["÷ DDP, tuned", *to_ddp["hvdlite"]],
            [
                [way, *("; ".join(f"{value:.2f}" for value in values) for values in found.values())]
                for way, found in to_ddp.items()
            ],
        ),
        "readme": _table(
            ["time of a step, compared with", *IN_README],
            [
                ["**no exchange at all**", *(f"{steps[model]['hvdlite']:.2f}" for model in IN_README)],
                ["… with `shard=True`", *(f"{steps[model]['hvdlite shard']:.2f}" for model in IN_README)],
                ["**torch's DDP**", *(f"{to_ddp['hvdlite'][name][0]:.2f}" for name in short)],
                ["… with `shard=True`", *(f"{to_ddp['hvdlite shard'][name][0]:.2f}" for name in short)],
            ],
        ),
    }


def placed(page: str) -> str:
    """Return a page of `PAGES` as it is with the figures of docs/figures.json."""
    known = texts(json.loads((ROOT / "docs/figures.json").read_text()))
    return PLACE.sub(lambda place: place[1] + known[place[2]] + place[3], (ROOT / page).read_text())


if __name__ == "__main__":
    for page in PAGES:
        if (text := placed(page)) != (ROOT / page).read_text():
            (ROOT / page).write_text(text)
