"""Compares hvdlite in this tree with hvdlite in another tree: ``python -m benchmarks against ../before``.

Each tree has jobs of its own, which take turns step by step and call by call. So a slow minute of the machine is slow for both
trees, and the ratio is more exact than the ratio of two runs of ``python -m benchmarks``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from tqdm import tqdm

from benchmarks import job, plan
from benchmarks.checks import WrongResult, check_weights
from benchmarks.figures import summary
from benchmarks.report import aligned, size, time_of
from benchmarks.steps import interleaved
from benchmarks.turns import Players, players
from benchmarks.ways import Ways

OTHER, THIS = "other", "this"
VARIANTS = {name: shown for name, shown in plan.VARIANTS.items() if shown in (plan.HVDLITE, plan.SHARD, plan.OVERLAP)}
WORKLOADS = {name: shown for name, shown in plan.WORKLOADS.items() if shown not in plan.LARGE}
_PACKAGES = ("hvdlite", "hvdlite_torch", "hvdlite_tf")
_HOW = """\
Two ranks with one thread each. Both trees are measured by the benchmarks of this tree, in turns. Cells: median (minimum).
Ratio: of medians, this tree to the other one (below 1: this tree is faster), with an interval that has the true ratio with
90 % (bootstrap over the samples). Sums are compared with the true sum, and trained weights with those of the other tree."""


def main(arguments: Sequence[str]) -> int:
    """Run the program, and return its exit code."""
    options = _parser().parse_args(arguments)
    other = options.tree.resolve()
    if missing := [name for name in _PACKAGES if not (other / name / "__init__.py").is_file()]:
        print(
            f"python -m benchmarks against: {other} has no {', '.join(missing)}: expected a clone of hvdlite.",
            file=sys.stderr,
        )
        return 2
    print(_HOW, end="\n\n")
    try:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            for name in _PACKAGES:
                (root / name).symlink_to(other / name)
            (root / "benchmarks").symlink_to(job.ROOT / "benchmarks")
            names = [_name(variant, tree) for variant in options.variants for tree in (OTHER, THIS)]
            settings = {name: {"variant": name.partition(", ")[0], "tiny": options.tiny} for name in names}
            roots = {name: root for name in names if name.endswith(OTHER)}
            with players("trainer", plan.STEP_RANKS, settings, roots) as jobs:
                _steps(jobs, names, options)
                _allreduce(jobs, options)
    except (job.JobFailed, WrongResult) as failure:
        print(f"python -m benchmarks against: {failure}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks against", description=__doc__)
    add = parser.add_argument
    add("tree", type=Path, help="the folder of the other tree, such as a clone of an earlier commit")
    rounds = f"turns of each tree (25), of {plan.TURN_STEPS} steps; as many for allreduce"
    add("--rounds", type=int, default=25, help=rounds)
    for option, table in (("--variants", VARIANTS), ("--workloads", WORKLOADS)):
        what = f"separated by commas, of {', '.join(table)} (all)"
        add(option, type=plan.names_in(table), default=list(table.values()), metavar="NAMES", help=what)
    add("--kinds", nargs="*", choices=plan.KINDS, default=("float32", "bfloat16"), help="of tensors (float32 bfloat16)")
    add("--sizes", type=int, nargs="+", metavar="BYTES", default=plan.SIZES, help="of a tensor (4 B to 64 MiB)")
    add("--tiny", action="store_true", help="models of a few thousand parameters, to try the program")
    return parser


def _name(variant: str, tree: str) -> str:
    return f"{variant}, {tree}"


def _steps(jobs: Players, names: Sequence[str], options: argparse.Namespace) -> None:
    for workload in options.workloads:
        for name in names:
            jobs.ask(name, do="begin", workload=workload)
            jobs.ask(name, do="step", count=plan.CHECK_STEPS)
        times = interleaved(jobs, names, options.rounds, workload if sys.stderr.isatty() else None)
        for variant in options.variants:
            with closing(Ways()) as ways:
                ways.compare(jobs, _name(variant, OTHER))
                deviation, _ = ways.compare(jobs, _name(variant, THIS))
            check_weights({f"{workload}: {variant}, this tree against the other": deviation})
        _show(workload, {each: (times[_name(each, OTHER)], times[_name(each, THIS)]) for each in options.variants})


def _allreduce(jobs: Players, options: argparse.Namespace) -> None:
    names = {tree: _name(options.variants[0], tree) for tree in (OTHER, THIS)}
    for kind in options.kinds:
        found = {}
        for nbytes in tqdm(options.sizes, kind, unit="size", leave=False, disable=None):
            times: dict[str, list[float]] = {OTHER: [], THIS: []}
            for name in names.values():
                jobs.ask(name, do="tensor", kind=kind, bytes=nbytes)
            for turn in range(max(2, options.rounds)):
                for tree in (OTHER, THIS) if turn % 2 else (THIS, OTHER):
                    ranks = jobs.ask(names[tree], do="calls", repeats=min(50, max(1, 2**24 // nbytes)))
                    times[tree] += map(max, zip(*ranks, strict=True))
            found[size(nbytes)] = times[OTHER], times[THIS]
        _show(f"allreduce of {kind}", found)


def _show(title: str, found: dict[str, tuple[list[float], list[float]]]) -> None:
    rows = [["", "other tree", "this tree", "ratio", "90 %"]]
    for name, (other, this) in found.items():
        low, middle, high = ratio_of_medians(other, this)
        rows.append(
            [name, time_of(summary(other)), time_of(summary(this)), f"{middle:.3f}", f"{low:.3f} to {high:.3f}"]
        )
    print(f"{title}\n{aligned(rows)}\n", flush=True)


def ratio_of_medians(other: Sequence[float], this: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of the medians, `this` to `other`, between the ends of its interval of 90 % by the bootstrap.

    See Efron, "Bootstrap methods: another look at the jackknife", 1979.
    """
    draw = np.random.default_rng(0)
    medians = [np.median(draw.choice(samples, (1000, len(samples))), axis=1) for samples in (this, other)]
    low, high = np.quantile(medians[0] / medians[1], (0.05, 0.95))
    return float(low), float(np.median(this) / np.median(other)), float(high)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
