"""Run a function on several ranks, in a job of their own.

The other end of `run` is this module too: ``python -m benchmarks.job MODULE SETTINGS RESULT`` is what each rank starts.
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

ROOT = Path(__file__).resolve().parent.parent

# One thread for each rank, whatever the library: peers are to differ in the exchange, not in how they share cores.
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}


class JobFailed(Exception):
    """A job did not come to its end; what it said is on stderr."""


def run(
    module: str,
    ranks: int,
    settings: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> Any:
    """Call ``measure(**settings)`` of a module of this package on each of `ranks` ranks.

    Args:
        module: Such as "allreduce".
        ranks: How many; the launcher places them without binding, and lets waiting ranks yield where cores are short.
        settings: Keyword arguments, as JSON can carry them.
        environ: More for the environment.
        timeout: Seconds that the job may take.

    Returns:
        What rank 0 returned, by way of JSON.

    Raises:
        JobFailed: A rank failed, or it took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "hvdlite.launch", "-np", str(ranks), "--no-tag-output"]
        command += [sys.executable, "-m", "benchmarks.job", f"benchmarks.{module}", json.dumps(settings), str(result)]
        env = {**os.environ, **ONE_THREAD, **(environ or {})}
        try:
            done = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise JobFailed(f"{module} on {ranks} ranks was not done after {timeout:g} s.") from None
        if done.returncode != 0:
            raise JobFailed(f"{module} on {ranks} ranks ended with code {done.returncode}.")
        return json.loads(result.read_text())


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
