"""Compare the step that `hvdlite doctor` predicts with the step that it measures, on the ranks that there are.

    python -m benchmarks.doctor
    python -m benchmarks.doctor --rate 1gbit --repeat 3

It does so for 2 and 4 ranks of this machine, and for 2 + 2 ranks on two hosts, which are namespaces of this machine
(`tests/support/hosts.py`; this needs root). The program is the small GPT of `benchmarks/advised.py`; and there are models of
which only the size and the time of a step are known, and whose gradients are exchanged as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.machine import machine
from benchmarks.report import aligned, heading
from hvdlite.tools.advise.report import ms
from tests.support.hosts import Hosts, hosts, why_not

LIMIT = 200.0
"""The longest time of one run in seconds."""
WHERE = {"2 ranks": ["-np", "2"], "4 ranks": ["-np", "4"], "2 + 2 ranks": ["-H", "node1:2,node2:2"]}
MODELS = {
    "GPT, 860 k parameters": ["benchmarks/advised.py", "--", "gradients", "--steps", "1000"],
    "10 M parameters, 0.1 s": ["--parameters", "10e6", "--step-seconds", "0.1"],
    "110 M parameters, 0.2 s": ["--parameters", "110e6", "--step-seconds", "0.2"],
}


def run(on: Hosts | None, where: Sequence[str], model: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return what ``hvdlite doctor --json`` writes about its prediction.

    Raises:
        SystemExit: It has failed.
    """
    path = folder / "doctor.json"
    end = model.index("--") if "--" in model else len(model)
    skip = ["--skip", "imports", "links", "operations", "--json", str(path)]
    words = ["-m", "hvdlite", "doctor", *model[:end], *where, *skip, *model[end:]]
    if on is None:
        done = subprocess.run(
            [sys.executable, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT
        )
    else:
        done = on.run("node1", sys.executable, *words, timeout=LIMIT)
    found = json.loads(path.read_text())["prediction"] if path.exists() else None
    path.unlink(missing_ok=True)
    if found is None or found["measured"] is None:
        raise SystemExit(
            f"doctor: {' '.join(words)} has failed (exit code {done.returncode}).\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        )
    result: dict[str, Any] = found
    return result


def table(figures: Sequence[dict[str, Any]]) -> str:
    """Return the figures as text."""
    rows = [["", "", "predicted", "measured", "difference"]]
    for each in figures:
        off = each["predicted"] / each["measured"] - 1
        rows.append([each["model"], each["where"], ms(each["predicted"]), ms(each["measured"]), f"{off:+.0%}"])
    return aligned(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="what each host may send, as tc writes it (1gbit)")
    parser.add_argument("--repeat", type=int, default=1, help="how often (1)")
    parser.add_argument("--where", nargs="+", choices=WHERE, default=list(WHERE), help="on which ranks")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which models")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    if any("-H" in WHERE[where] for where in options.where) and (reason := why_not(needs_rate=True)):
        parser.error(f"{reason}; or choose others by --where")
    cases = [(model, where) for _ in range(options.repeat) for model in options.models for where in options.where]
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        for model, where in tqdm(cases, unit="case", disable=None):
            with hosts(2, options.rate) if "-H" in WHERE[where] else contextlib.nullcontext() as on:
                found = run(on, WHERE[where], MODELS[model], Path(folder))
            figures.append({"model": model, "where": where, **found})
    here = machine()
    print(f"{heading(here, {'library': ''})}\n{table(figures)}")
    if options.json:
        options.json.write_text(json.dumps({"machine": here, "figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
