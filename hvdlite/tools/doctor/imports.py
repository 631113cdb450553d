"""Tries whether packages can be imported, each in a process of its own with a time limit: half-installed ones crash or hang."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from hvdlite.config import environment
from hvdlite.tools.doctor.observe import PACKAGES, version

FRAMEWORKS = "torch", "tensorflow", "jax", "cupy"
SECONDS = 12.0
"""The time that an import may take."""


def broken_imports(names: Sequence[str] = FRAMEWORKS, seconds: float = SECONDS) -> dict[str, str]:
    """Return why packages that are installed cannot be imported, by name. They are tried at the same time.

    Args:
        names: The names of distributions, keys of `PACKAGES`.
        seconds: How long an import may take.
    """
    there = [name for name in names if version(name, PACKAGES[name]) is not None]
    if not there:
        return {}
    with ThreadPoolExecutor(len(there)) as pool:
        answers = list(pool.map(lambda name: _try(PACKAGES[name], seconds), there))
    return {name: why for name, why in zip(there, answers, strict=True) if why}


def _try(module: str, seconds: float) -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            env={**environment(), "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
    except subprocess.TimeoutExpired:
        return f"the import was not done within {seconds:g} s"
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return f"the import was killed by signal {-done.returncode}"
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]
