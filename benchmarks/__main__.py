"""Measure hvdlite and its peers in the same run. The program starts its own ranks.

Examples:
    python -m benchmarks                        allreduce and steps, in about 20 minutes on two cores
    python -m benchmarks --quick                the same in about two minutes, with rough figures
    python -m benchmarks allreduce --kinds float32 --ranks 2
    python -m benchmarks steps --json figures.json --plot steps.png
    python -m benchmarks steps --workloads mlp_wide,resnet18 --variants tuned,plain,sharded
    python -m benchmarks keras                  steps of Keras' fit on TensorFlow
    python -m benchmarks backend                torch.distributed over the backend hvdlite, and over gloo
    python -m benchmarks against ../before      this tree and another one in turns: did a change make hvdlite slower?
    python -m benchmarks scaling --help         the cost of negotiation by number of ranks (a separate program)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import against, job, plan, report, steps
from benchmarks.checks import WrongResult
from benchmarks.machine import machine


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["scaling"]:
        return _scaling(arguments[1:])
    if arguments[:1] == ["against"]:
        return against.main(arguments[1:])
    options = _parser().parse_args(arguments)
    here = machine()
    results: dict[str, Any] = {"machine": here}
    try:
        for part, measure in PARTS.items():
            if options.part == part or (options.part == "all" and part in ("allreduce", "steps")):
                results[part] = measure(options, here)
    except (job.JobFailed, WrongResult) as failure:
        print(f"python -m benchmarks: {failure}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    if options.plot:
        _plot(results, options.plot)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    parts = ("all", *PARTS)
    add("part", nargs="?", choices=parts, default="all", help="what to measure (all: allreduce and steps)")
    add("--quick", action="store_true", help="few rounds and sizes")
    rounds = f"turns of each peer ({plan.ROUNDS}), timed steps ({plan.STEP_ROUNDS}), timed fits ({plan.KERAS_ROUNDS})"
    add("--rounds", type=int, help=rounds)
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add("--plot", type=Path, metavar="FILE", help="draw a PNG; of both parts, FILE with -allreduce and with -steps")
    add = parser.add_argument_group("allreduce").add_argument
    add("--ranks", type=int, nargs="+", default=plan.RANKS, help="how many ranks (2 4)")
    add("--sizes", type=int, nargs="+", metavar="BYTES", help="of a tensor (4 B to 64 MiB)")
    add("--kinds", nargs="+", choices=plan.KINDS, default=plan.KINDS, help="of tensors (all)")
    add = parser.add_argument_group("steps").add_argument
    add("--tiny", action="store_true", help="models of a few thousand parameters, to try the program")
    for option, table in (("--workloads", plan.WORKLOADS), ("--variants", plan.VARIANTS)):
        what = f"separated by commas, of {', '.join(table)} (all)"
        add(option, type=plan.names_in(table), default=list(table.values()), metavar="NAMES", help=what)
    add("--memory", action="store_true", help="the memory too, which is a job for each variant")
    return parser


def _allreduce(options: argparse.Namespace, here: dict[str, Any]) -> dict[str, Any]:
    settings = {
        "kinds": options.kinds,
        "sizes": options.sizes or (plan.QUICK_SIZES if options.quick else plan.SIZES),
        "rounds": options.rounds or (plan.QUICK_ROUNDS if options.quick else plan.ROUNDS),
        "progress": sys.stderr.isatty(),
    }
    runs = [job.run("allreduce", ranks, settings) for ranks in options.ranks]
    figures = [figure for run in runs for figure in run["figures"]]
    result = {"how": plan.HOW_ALLREDUCE, "settings": settings, **runs[0], "figures": figures}
    _print("Allreduce", here, result, report.allreduce_tables(figures))
    return result


def _steps(options: argparse.Namespace, here: dict[str, Any]) -> dict[str, Any]:
    settings = {
        "names": options.workloads,
        "variants": options.variants,
        "rounds": options.rounds or (plan.QUICK_STEP_ROUNDS if options.quick else plan.STEP_ROUNDS),
        "large_rounds": options.rounds or (plan.QUICK_STEP_ROUNDS if options.quick else plan.LARGE_ROUNDS),
        "tiny": options.tiny,
        "progress": sys.stderr.isatty(),
    }
    how = f"{plan.HOW_STEPS}\n\n{plan.HOW_MEMORY}" if options.memory else plan.HOW_STEPS
    result: dict[str, Any] = {"how": how, "settings": settings, "figures": [], "memory": [], "skipped": {}}
    for found in steps.measure(**settings):
        figures, skipped = found["figures"], found["skipped"]
        held = _memory(options, figures[0]["workload"], [each["variant"] for each in figures]) if options.memory else []
        if not result["figures"]:
            _print_head("Training steps", here, {**found, "how": how})
        new = {variant: why for variant, why in skipped.items() if variant not in result["skipped"]}
        _print_parts(report.skipped(new), report.step_table(figures, held))
        result["figures"] += figures
        result["memory"] += held
        result["skipped"] |= skipped
        result["mpi"] = found["mpi"]
    return result


def _keras(options: argparse.Namespace, here: dict[str, Any]) -> dict[str, Any]:
    settings = {
        "names": plan.KERAS_WORKLOADS,
        "rounds": options.rounds or (plan.QUICK_KERAS_ROUNDS if options.quick else plan.KERAS_ROUNDS),
        "tiny": options.tiny,
        "progress": sys.stderr.isatty(),
    }
    run = job.run("keras_steps", plan.STEP_RANKS, settings)
    result = {"how": plan.HOW_KERAS, "settings": settings, **run}
    _print("Steps of Keras' fit", here, result, report.step_table(run["figures"], []))
    return result


def _backend(options: argparse.Namespace, here: dict[str, Any]) -> dict[str, Any]:
    settings = {
        "sizes": options.sizes or (plan.QUICK_SIZES if options.quick else plan.BACKEND_SIZES),
        "rounds": options.rounds or (plan.QUICK_ROUNDS if options.quick else plan.ROUNDS),
        "step_rounds": options.rounds or (plan.QUICK_STEP_ROUNDS if options.quick else plan.STEP_ROUNDS),
        "tiny": options.tiny,
        "progress": sys.stderr.isatty(),
    }
    run = job.run("torch_backend", plan.STEP_RANKS, settings)
    result = {"how": plan.HOW_BACKEND, "settings": settings, **run}
    _print("torch.distributed", here, result, report.backend_tables(run["figures"], run["steps"]))
    return result


PARTS = {"allreduce": _allreduce, "steps": _steps, "keras": _keras, "backend": _backend}


def _memory(options: argparse.Namespace, name: str, variants: Sequence[str]) -> list[dict[str, Any]]:
    return [
        job.run("memory", plan.STEP_RANKS, {"name": name, "variant": variant, "tiny": options.tiny})
        for variant in tqdm(variants, f"{name}: memory", unit="job", leave=False, disable=None)
    ]


def _print(title: str, here: dict[str, Any], result: dict[str, Any], tables: str) -> None:
    _print_head(title, here, result)
    _print_parts(report.skipped(result["skipped"]), tables)


def _print_head(title: str, here: dict[str, Any], result: dict[str, Any]) -> None:
    _print_parts(f"{title}\n{'=' * len(title)}\n{report.heading(here, result['mpi'])}", result["how"])


def _print_parts(*parts: str) -> None:
    print("\n\n".join(part for part in parts if part), end="\n\n", flush=True)


def _plot(results: dict[str, Any], path: Path) -> None:
    from benchmarks import plots  # only this part needs matplotlib

    parts = [part for part in PARTS if part in results]
    paths = {part: path if len(parts) == 1 else path.with_stem(f"{path.stem}-{part}") for part in parts}
    if "allreduce" in paths:
        plots.plot_allreduce(results["allreduce"]["figures"], paths["allreduce"])
    if "steps" in paths:
        plots.plot_steps(results["steps"]["figures"], results["steps"]["memory"], paths["steps"])
    if "backend" in paths:
        plots.plot_backend(results["backend"]["figures"], results["backend"]["steps"], paths["backend"])
    if "keras" in paths:
        plots.plot_steps(results["keras"]["figures"], [], paths["keras"])


def _scaling(arguments: Sequence[str]) -> int:
    if importlib.util.find_spec("benchmarks.scaling") is None:
        print("python -m benchmarks scaling: there is no benchmarks/scaling.py here.", file=sys.stderr)
        return 2
    return subprocess.run([sys.executable, "-m", "benchmarks.scaling", *arguments], cwd=job.ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
