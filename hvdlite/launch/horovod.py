"""What the launcher does for programs that import Horovod: the environment in which ``import horovod`` means hvdlite.

A folder on PYTHONPATH holds a sitecustomize.py (see `hvdlite.compat`), which every Python of the job runs at its start. The
place of each rank is set by its worker, see rank_environment.py.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from hvdlite.errors import LaunchError
from hvdlite.worker.rank_environment import HOROVOD_VARIABLE

STARTUP = str(Path(__file__).resolve().parent.parent / "compat" / "startup")


def job_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a job whose programs import Horovod."""
    result = {**environ, HOROVOD_VARIABLE: "1"}
    lead_children(result)
    return result


def lead_children(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have the Python processes that start with this environment import hvdlite for Horovod."""
    path = environ.get("PYTHONPATH", "")
    if STARTUP not in path.split(os.pathsep):
        # An empty entry would mean the working directory.
        environ["PYTHONPATH"] = f"{STARTUP}{os.pathsep}{path}" if path else STARTUP


def check_interpreter(command: Sequence[str]) -> None:
    """Check that the interpreter of a rank's command looks at PYTHONPATH.

    Args:
        command: What each rank starts, as `hvdlite.job.mpi.worker_command` has made it.

    Raises:
        LaunchError: An option keeps it from that.
    """
    for option in command[1:]:
        if not option.startswith("-") or option.startswith("--"):
            break
        if not option.startswith(("-W", "-X")) and set("EIS") & set(option):
            raise LaunchError(
                f"--horovod works through PYTHONPATH, which {shlex.quote(command[0])} {option} does not look at: "
                "leave that option out."
            )
