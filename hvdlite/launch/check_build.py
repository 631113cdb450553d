"""``hvdliterun --check-build`` prints what is installed; ``hvdlite env`` adds the settings that hold, for reports.

Frameworks are looked up without importing them. MPI is asked in a separate process with a time limit, because a broken
MPI hangs or crashes.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from hvdlite.config import Config, variable_of
from hvdlite.errors import LaunchError
from hvdlite.launch.job.mpi import find_mpi, installed_wheels
from hvdlite.ranks.memory_ways import memory_ways
from hvdlite.ranks.network import has_fabric, own_addresses

_FRAMEWORKS = {"PyTorch": "torch", "TensorFlow": "tensorflow", "Keras": "keras", "JAX": "jax", "CuPy": "cupy"}
_MPI_SECONDS = 30

_NO_LIBRARY = "cannot load MPI library"
"""What mpi4py says if it finds no MPI."""

_ASK_MPI = """
import ctypes, json
from mpi4py import MPI
levels = {getattr(MPI, "THREAD_" + name): name for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
paths = {line.split()[-1] for line in open("/proc/self/maps") if "/libmpi" in line}
queries = [getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None) for path in sorted(paths)]
cuda = next((bool(query()) for query in queries if query is not None), None)
print(json.dumps({
    "library": MPI.Get_library_version().split(chr(0))[0].splitlines()[0].split(",")[0].split(),
    "threads": levels[MPI.Query_thread()],
    "cuda": cuda,
}))
"""


def check_build() -> tuple[str, bool]:
    """Return the whole list as text, in which an X marks each line whose item is there, and whether jobs can run here."""
    launcher, library = _launcher(), _library()
    lines = [f"hvdlite {own_version()}", "", "Frameworks:"]
    for name, module in _FRAMEWORKS.items():
        found = importlib.util.find_spec(module) is not None
        lines.append(_line(found, name, (_version(module) or "version unknown") if found else "not installed"))
    lines += ["", "MPI:", *(_line(*each) for each in (launcher, *library))]
    nccl = find_nccl()
    lines += ["", "GPU:", _line(nccl is not None, "NCCL", nccl or "not found")]
    lines += ["", "Between hosts:", _line(*between_hosts())]
    lines += ["", "Memory:", *(_line(*way) for way in memory_ways())]
    return "\n".join(lines), launcher[0] and library[0][0]


def own_version() -> str:
    """Return the version of hvdlite, or a remark in parentheses if hvdlite is not installed."""
    return _version("hvdlite") or "(not installed: running from its source)"


def _line(good: bool, name: str, value: str) -> str:
    return f"  [{'X' if good else ' '}] {name}: {value}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _launcher() -> tuple[bool, str, str]:
    try:
        mpi = find_mpi()
    except LaunchError as error:
        return False, "launcher", str(error)
    return True, "launcher", f"{mpi.flavour} {'.'.join(map(str, mpi.version))}, {mpi.program}"


def _library() -> list[tuple[bool, str, str]]:
    answer = ask_library()
    if isinstance(answer, str):
        return [(False, "library", answer)]
    cuda = {True: "yes", False: "no", None: "no (the library cannot tell)"}[answer.cuda]
    return [
        (True, "library", f"{answer.name}, through mpi4py {_version('mpi4py')}"),
        (answer.threads == "MULTIPLE", "calls from several threads", answer.threads),
        (bool(answer.cuda), "CUDA-aware", cuda),
    ]


def between_hosts() -> tuple[bool, str, str]:
    """Return whether large data can go between hosts by sockets, and what says so, for a line of the list."""
    name, way = "large data by sockets", Config.from_env().between_hosts
    if way == "mpi":
        return False, name, "by MPI (HVDLITE_BETWEEN_HOSTS=mpi)"
    if way == "auto" and has_fabric():
        return False, name, "by MPI, which drives this host's fabric"
    try:
        return True, name, ", ".join(own_addresses())
    except OSError as error:
        return False, name, f"by MPI: {error}"


class MpiLibrary(NamedTuple):
    """The MPI library that ranks load.

    Attributes:
        name: Its name and version.
        threads: The thread level that it gives: "SINGLE", "FUNNELED", "SERIALIZED" or "MULTIPLE".
        cuda: Whether it reads memory of NVIDIA's GPUs; None if it cannot tell.
    """

    name: str
    threads: str
    cuda: bool | None


def ask_library(seconds: float = _MPI_SECONDS) -> MpiLibrary | str:
    """Ask the MPI library in a process of its own. Return why it cannot be used, if it did not answer within some seconds."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    command = [sys.executable, "-c", _ASK_MPI]
    alone = {**os.environ, "OMPI_MCA_btl": "self"}  # else Open MPI would leave a file in /dev/shm
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=True, env=alone
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return f"broken: MPI_Init did not come back in {seconds:g} s"
    except subprocess.CalledProcessError as error:
        why = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        return "none installed" if _NO_LIBRARY in error.stderr and not installed_wheels() else f"broken: {why}"
    except (ValueError, IndexError):
        return f"broken: it printed {done.stdout!r}"
    return MpiLibrary(" ".join(answer["library"]), answer["threads"], answer["cuda"])


def find_nccl() -> str | None:
    """Find the NCCL library: the path in NVIDIA's pip package, or else the name of the system's library."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        for library in sorted(Path(folder).glob("nccl/lib/libnccl.so*")):
            return str(library)
    return ctypes.util.find_library("nccl")


_SECRETS = {"control", "generation"}


def describe_environment(environ: Mapping[str, str]) -> str:
    """Return what is installed, and the settings that these variables give, as text. Secrets of a job are not in it.

    Raises:
        ArgumentError: A variable has a value that is not allowed.
    """
    config, lines = Config.from_env(environ), []
    for field in fields(Config):
        value, whence = getattr(config, field.name), variable_of(field.name, environ)
        shown = "(set)" if field.name in _SECRETS and value else value
        lines.append(f"  HVDLITE_{field.name.upper()}: {shown}{f' (from {whence})' if whence else ''}")
    return "\n".join([check_build()[0], "", "Settings:", *lines])
