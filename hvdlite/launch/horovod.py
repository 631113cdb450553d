"""This file makes the environment of a job whose programs import Horovod: there ``import horovod`` means hvdlite.

A folder on PYTHONPATH holds a sitecustomize.py (see `hvdlite.compat`). Every Python process of the job runs it at its start.
The worker of each rank sets the variables that tell the rank its number, see `hvdlite.launch.worker.rank_environment`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from hvdlite.errors import LaunchError
from hvdlite.launch.worker.rank_environment import HOROVOD_VARIABLE

STARTUP = str(Path(__file__).resolve().parent.parent / "compat" / "startup")


def job_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a job whose programs import Horovod: `environ`, and what such a job needs too."""
    result = {**environ, HOROVOD_VARIABLE: "1"}
    add_startup_folder(result)
    return result


def add_startup_folder(environ: MutableMapping[str, str] = os.environ) -> None:
    """Change `environ` so that every Python process started with it takes ``import horovod`` for hvdlite."""
    path = environ.get("PYTHONPATH", "")
    if STARTUP not in path.split(os.pathsep):
        # An empty entry would mean the working directory.
        environ["PYTHONPATH"] = f"{STARTUP}{os.pathsep}{path}" if path else STARTUP


def check_interpreter(command: Sequence[str]) -> None:
    """Check that the interpreter of a rank's command reads PYTHONPATH.

    Args:
        command: The command that each rank starts, as `hvdlite.launch.job.mpi.worker_command` has made it.

    Raises:
        LaunchError: An option of the interpreter (-E, -I or -S) would turn PYTHONPATH or sitecustomize.py off.
    """
    for option in command[1:]:
        if not option.startswith("-") or option.startswith("--"):
            break
        if not option.startswith(("-W", "-X")) and set("EIS") & set(option):
            raise LaunchError(
                f"--horovod works through PYTHONPATH, which {shlex.quote(command[0])} {option} does not look at: "
                "leave that option out."
            )
