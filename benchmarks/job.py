"""Runs a function on several ranks, in a job of their own.

Each rank of a `Job` runs this module too: ``python -m benchmarks.job MODULE SETTINGS RESULT``.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.plan import SMALL_PAGES

ROOT = Path(__file__).resolve().parent.parent

# Every library has one thread per rank: peers must differ in the exchange, not in how they share cores.
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}

NO_ADVICE = {"HVDLITE_ADVICE": "0"}
"""Some variants train alone on purpose."""

_END_SECONDS = 10
"""The seconds that the launcher may take to end after SIGTERM."""


class JobFailed(Exception):
    """A job has failed or has taken too long. The output of the job is on stderr."""


class Job:
    """A job in which each rank calls ``measure(**settings)`` of a module of this package. A with statement ends the job.

    Args:
        module: The name of the module, such as "allreduce".
        ranks: The number of ranks. The launcher does not bind ranks to cores, and lets waiting ranks yield if cores are few.
        settings: The keyword arguments of ``measure``, which must be valid in JSON.
        environ: Environment variables to add.
        root: The folder from which the job imports hvdlite and this package; this tree if None.
    """

    def __init__(
        self,
        module: str,
        ranks: int,
        settings: Mapping[str, Any],
        environ: Mapping[str, str] | None = None,
        root: Path | None = None,
    ) -> None:
        self._what = f"{module} on {ranks} ranks"
        self._folder = tempfile.TemporaryDirectory()
        self._result = Path(self._folder.name) / "result.json"
        command = [sys.executable, "-m", "hvdlite.launch", "-np", str(ranks), "--no-tag-output"]
        command += [sys.executable, "-m", "benchmarks.job", f"benchmarks.{module}", json.dumps(settings)]
        env = {**os.environ, **ONE_THREAD, **NO_ADVICE, **(environ or {})}
        if settings.get("variant") in SMALL_PAGES:
            env["HVDLITE_HUGE_PAGES"] = "0"
        if root is not None:
            env["PYTHONPATH"] = str(root)
        command.append(str(self._result))
        self._process = subprocess.Popen(command, cwd=root or ROOT, env=env, stdin=subprocess.DEVNULL)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()

    @property
    def ended(self) -> bool:
        """Return whether the job has ended by itself."""
        return self._process.poll() is not None

    def result(self, timeout: float | None = None) -> Any:
        """Return the result of ``measure`` on rank 0, converted to JSON and back.

        Args:
            timeout: The seconds that the job may still take; None for no limit.

        Raises:
            JobFailed: A rank has failed, or the job has taken too long.
        """
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise JobFailed(f"{self._what} was not done after {timeout:g} s.") from None
        if code != 0:
            raise JobFailed(f"{self._what} ended with code {code}.")
        return json.loads(self._result.read_text())


def run(
    module: str,
    ranks: int,
    settings: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> Any:
    """Run a `Job` and return its `result`."""
    with Job(module, ranks, settings, environ) as job:
        return job.result(timeout)


def _be_a_rank(module: str, settings: str, result: str) -> None:
    import torch

    import hvdlite

    torch.set_num_threads(1)
    hvdlite.init()
    returned = importlib.import_module(module).measure(**json.loads(settings))
    if hvdlite.rank() == 0:
        Path(result).write_text(json.dumps(returned))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _be_a_rank(*sys.argv[1:])
