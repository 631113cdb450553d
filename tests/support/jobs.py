"""Runs real jobs for tests, under hvdliterun or under plain mpirun, each with a hard time limit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests/programs"
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
LIMIT = 60.0  # seconds for one job: only a hang takes that long
GRACE = 20.0  # seconds for a job that was asked to end
PROMPT = (
    9.0  # seconds from a rank's failure to the end of the job: hvdliterun promises 3, and tests run on a busy machine
)

_BESIDE = Path(sys.executable).with_name("mpirun")
MPIRUN = _BESIDE if _BESIDE.exists() else Path(shutil.which("mpirun") or "mpirun")
MPIRUN_FLAGS = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
MPIRUN_FLAGS += ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp", "--mca", "mpi_yield_when_idle", "1"]


def mpirun(size: int, *command: str, timeout: float = LIMIT, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a Python command on `size` ranks under plain mpirun.

    Raises:
        TimeoutExpired: The job takes longer than `timeout` seconds. The job is asked to end, and its output is printed.
    """
    words = [str(MPIRUN), *MPIRUN_FLAGS, "-n", str(size), sys.executable, *command]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, env={**os.environ, **environ}, cwd=ROOT, text=True, **pipes) as job:
        try:
            out, err = job.communicate(timeout=timeout)
        except BaseException:
            job.terminate()  # it ends the ranks, and clears away its folders and memory, which would stay after a kill
            try:
                print(*job.communicate(timeout=GRACE), sep="\n")
            except subprocess.TimeoutExpired as late:
                job.kill()
                print((late.stdout or b"").decode(errors="replace"), (late.stderr or b"").decode(errors="replace"))
            raise
    return subprocess.CompletedProcess(words, job.returncode, out, err)


def run_each(
    commands: Sequence[str], folder: Path, launch: Sequence[str] = (), **environ: str
) -> list[dict[str, tuple[int, str, str]]]:
    """Run several programs one after the other in one job (see tests/programs/run_each.py).

    Args:
        commands: Each command is the path of a program below `ROOT`, and its arguments, without spaces in them.
        folder: An empty folder for the results.
        launch: The words before the program, after ``python``; empty for one process without a launcher.
        environ: Environment variables to add.

    Returns:
        For each rank, by command: the exit code, stdout and stderr.
    """
    done = subprocess.run(
        [sys.executable, *launch, str(PROGRAMS / "run_each.py"), str(folder), *commands],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, **environ},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=5 * LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    files = sorted(folder.glob("[0-9]*.json"))
    return [json.loads(file.read_text()) for file in files]


def seconds_since_failure(out: str, at: float) -> float:
    """Return the seconds from the failure of a program, which has printed the time of its failure in `out`, to `at`."""
    failed_at = re.search(r"failing at ([\d.]+)$", out, re.M)
    assert failed_at is not None, out
    return at - float(failed_at[1])


@dataclass
class Ended:
    code: int
    out: str
    err: str
    at: float


class Started:
    """A running hvdliterun. A mark in the environment identifies its processes."""

    def __init__(self, arguments: list[str], env: dict[str, str] | None = None, cwd: Path | None = None) -> None:
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hvdlite.launch", *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {}), "LAUNCH_TEST_MARK": self.mark},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, limit: float = LIMIT) -> Ended:
        out, err = self.process.communicate(timeout=limit)
        return Ended(self.process.returncode, out, err, time.time())

    def ready(self, count: int) -> list[tuple[int, int]]:
        """Wait until `count` ranks have printed "ready". Return the process ids of each rank and its guard."""
        assert self.process.stdout is not None
        found: list[tuple[int, int]] = []
        while len(found) < count:
            line = self.process.stdout.readline()
            assert line, f"ended early: {self.process.stderr and self.process.stderr.read()}"
            if match := re.search(r"ready \S+ (\d+) (\d+)", line):
                found.append((int(match[1]), int(match[2])))
        return found

    def processes(self) -> list[int]:
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            try:
                ours = entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes()
                if ours and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def wait_until_gone(self, seconds: float) -> None:
        wait_for(lambda: not self.processes(), seconds)


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


Start = Callable[..., Started]
