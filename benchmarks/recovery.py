"""Measures how long an elastic job takes from the death of a rank to the next finished step, by restart and in the process.

    python -m benchmarks.recovery                     four ranks with NumPy, 10 kills, half a minute
    python -m benchmarks.recovery --in-process        the ranks that are left go on; 10 jobs with a kill each
    python -m benchmarks.recovery --framework torch   each rank imports torch too
    python -m benchmarks.recovery --state 64          a committed state of 64 MiB
    python -m benchmarks.recovery --commits 200       no kill: what commits cost, with and without hvdliterun --state

One rank, another one each time, kills itself (SIGKILL) after a step, and writes down the time. The time ends with the first
step that the restarted ranks, or those that go on, have finished: a step exchanges the state's gradient, and commits. The parts
of the time are shown too. Each start of a rank imports what it needs, which is measured apart.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import hvdlite as hvd
from hvdlite import elastic

SETTINGS = "RECOVERY_SETTINGS"
LIMIT = 600.0


def train() -> None:
    """One rank of the job that is measured."""
    settings = json.loads(os.environ[SETTINGS])
    begun = time.time()
    if settings["framework"]:
        importlib.import_module(settings["framework"])
    imported = time.time() - begun
    hvd.init()
    ready = time.time()
    state = elastic.ObjectState(weights=np.zeros(int(settings["mebibytes"] * 2**17)), step=0, kills=0)
    told = {"begun": begun, "imported": imported, "ready": ready}
    folder = Path(settings["folder"])

    @elastic.run
    def steps(state: elastic.ObjectState) -> None:
        called = time.time()
        while state.kills < settings["kills"] or state.step % 5 != 3:
            state.weights = state.weights + hvd.allreduce(np.ones(1000)).sum()
            state.step += 1
            if state.step % 5 == 0 and state.kills < settings["kills"]:
                mark = folder / f"kill.{state.kills}"
                if (settings["first"] + state.kills) % hvd.size() == hvd.rank() and not mark.exists():
                    mark.write_text(str(time.time()))
                    os.kill(os.getpid(), signal.SIGKILL)
                state.kills += 1  # what rank 0 commits here holds, though another rank is dead
            before = time.time()
            state.commit()
            first_step = folder / f"step.{os.getpid()}.{hvd.size()}"
            if hvd.rank() == 0 and not first_step.exists():
                done = {**told, "called": called, "done": time.time(), "commit": time.time() - before}
                first_step.write_text(json.dumps(done))

    @elastic.run
    def commits(state: elastic.ObjectState) -> None:
        square, told = np.ones((300, 300)), []
        while state.step < settings["commits"]:
            begun = time.time()
            for _ in range(10):
                square = square @ square / 300.0
            hvd.allreduce(np.ones(1000))
            state.step += 1
            before = time.time()
            state.commit()
            told.append((time.time() - begun, time.time() - before))
        if hvd.rank() == 0:
            (folder / "commits").write_text(json.dumps(told))

    (commits if settings["commits"] else steps)(state)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="ranks (4)")
    parser.add_argument("--kills", type=int, default=10, help="how often a rank dies (10)")
    parser.add_argument("--in-process", action="store_true", help="let the ranks that are left go on")
    parser.add_argument("--state", type=float, default=1.0, metavar="MIB", help="the size of what is committed (1)")
    parser.add_argument(
        "--commits", type=int, default=0, help="measure so many commits in each of six jobs, without kills"
    )
    parser.add_argument("--framework", choices=("torch", "tensorflow"), help="import this too")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    measure = _commits if options.commits else _in_process if options.in_process else _by_restart
    parts = measure(options)
    waits = next(iter(parts.values()))
    count = f"{len(waits)} {'commits' if options.commits else 'kills'}"
    print(f"{options.ranks} ranks, a state of {options.state:g} MiB, {count}; seconds")
    print(f"{'':<42} median   fastest  slowest")
    for name, values in parts.items():
        print(f"{name:<42} {statistics.median(values):<8.3f} {min(values):<8.3f} {max(values):<8.3f}")
    if options.json:
        options.json.write_text(json.dumps(parts, indent=2) + "\n")
    return 0


def _by_restart(options: argparse.Namespace) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        starts, kills = _run(options, Path(folder), kills=options.kills, fewest=options.ranks)
    later = starts[1:]
    return {
        "from the kill to the next finished step": [
            start["done"] - kill for start, kill in zip(later, kills, strict=True)
        ],
        "  until the program of rank 0 runs again": [
            start["begun"] - kill for start, kill in zip(later, kills, strict=True)
        ],
        f"  import of {options.framework or 'nothing more'}": [start["imported"] for start in later],
        "  until hvdlite.init() is done": [start["ready"] - start["begun"] - start["imported"] for start in later],
        "  state found and given to all, one step": [start["done"] - start["ready"] for start in later],
        "a commit": [start["commit"] for start in later],
    }


def _in_process(options: argparse.Namespace) -> dict[str, list[float]]:
    """Run a job for each kill: after it, there is a rank less."""
    waits, calls, commits = [], [], []
    for number in range(options.kills):
        with tempfile.TemporaryDirectory() as folder:
            (_, again), (kill,) = _run(
                options, Path(folder), kills=1, fewest=options.ranks - 1, first=number % options.ranks
            )
        waits.append(again["done"] - kill)
        calls.append(again["called"] - kill)
        commits.append(again["commit"])
    return {
        "from the kill to the next finished step": waits,
        "  until the function is called again": calls,
        "  one step": [wait - call for wait, call in zip(waits, calls, strict=True)],
        "a commit": commits,
    }


def _commits(options: argparse.Namespace) -> dict[str, list[float]]:
    """Run jobs with and without a folder in turn, and return the times of their steps and commits."""
    parts: dict[str, list[float]] = {}
    for number in range(6):
        with tempfile.TemporaryDirectory(dir=".") as name:
            folder, words = Path(name).resolve(), ("without --state", "with --state")[number % 2]
            _run(options, folder, 0, options.ranks, more=["--state", str(folder / "state")] if number % 2 else [])
            told = json.loads((folder / "commits").read_text())
        parts.setdefault(f"a step with its commit, {words}", []).extend(step for step, _ in told)
        parts.setdefault(f"the commit, {words}", []).extend(commit for _, commit in told)
    return parts


def _run(
    options: argparse.Namespace, folder: Path, kills: int, fewest: int, first: int = 0, more: Sequence[str] = ()
) -> tuple[list[dict[str, float]], list[float]]:
    """Run a job. Return what each rank 0 has told after its first step with a number of ranks, and the times of the kills."""
    settings = {
        "kills": kills,
        "first": first,
        "mebibytes": options.state,
        "folder": str(folder),
        "framework": options.framework,
        "commits": options.commits,
    }
    command = [sys.executable, "-m", "hvdlite.launch", "-np", str(options.ranks), "--min-np", str(fewest), *more]
    done = subprocess.run(
        [*command, "python", "-m", "benchmarks.recovery", "--rank"],
        env={**os.environ, SETTINGS: json.dumps(settings)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    went_on = done.stderr.count(" go on in their processes")
    if (
        done.returncode
        or len(re.findall("was killed by SIGKILL", done.stderr)) != kills
        or went_on != (fewest < options.ranks)
    ):
        raise SystemExit(f"python -m benchmarks.recovery: the job went wrong:\n{done.stdout}{done.stderr}")
    starts = sorted((json.loads(path.read_text()) for path in folder.glob("step.*")), key=lambda start: start["done"])
    return starts, [float((folder / f"kill.{number}").read_text()) for number in range(kills)]


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        train()
    else:
        sys.exit(main(sys.argv[1:]))
