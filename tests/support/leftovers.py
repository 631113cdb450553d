"""What a run of the tests has left in /dev/shm and in the folder for temporary files: the end of the run names it.

What is in /dev/shm may be of other programs, so the run fails only where HVDLITE_TESTS_ALONE is set.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")
LIMIT = 5.0
"""Seconds that processes of the last tests have to end."""
OURS = re.compile(r"hvdlite|ompi\.\d")
"""What must not be in the folder for temporary files: ours, and of launchers. TensorFlow, torch and others leave more."""


class Leftovers:
    """A plugin of the process that starts the others: all of them have a folder for temporary files, which goes in the end."""

    def __init__(self) -> None:
        self._before = _names(MEMORY)
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest clears its own folders away
        self._folder = Path(tempfile.mkdtemp(prefix="hvdlite-tests."))
        self._usual = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = tempfile.tempdir = str(self._folder)
        self._left: list[str] = []

    @pytest.hookimpl(trylast=True)  # after the other processes, which pytest-xdist ends
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        deadline = time.monotonic() + LIMIT
        while (left := self._found()) and time.monotonic() < deadline:
            time.sleep(0.1)
        self._left = left
        if left and "HVDLITE_TESTS_ALONE" in os.environ and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left:
            terminalreporter.section("left behind", red=True)
            terminalreporter.line(
                f"FAILED The tests (or another program) left behind: {', '.join(self._left)}", red=True
            )

    def pytest_unconfigure(self) -> None:
        tempfile.tempdir = None
        os.environ.pop("TMPDIR")
        if self._usual is not None:
            os.environ["TMPDIR"] = self._usual
        shutil.rmtree(self._folder, ignore_errors=True)

    def _found(self) -> list[str]:
        """What is there, was not there before, and is of no process that runs: other programs use /dev/shm as well."""
        new = _names(MEMORY) - self._before
        used = _used() if new else set()
        left = [str(MEMORY / name) for name in sorted(new) if str(MEMORY / name) not in used and not _is_of_one(name)]
        return left + [f"$TMPDIR/{name}" for name in sorted(_names(self._folder)) if OURS.match(name)]


def _names(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def _is_of_one(name: str) -> bool:
    """Whether a file or folder of hvdlite's, whose name has the number of a process, is of one that runs."""
    return name.startswith("hvdlite.") and any(
        Path(f"/proc/{part}").exists() for part in name.split(".") if part.isdigit()
    )


def _used() -> set[str]:
    """The files in /dev/shm that a process maps or has open, and the folders of these files."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found |= set(re.findall(rf"{MEMORY}/[^/\s]+", (process / "maps").read_text()))
            for each in (process / "fd").iterdir():
                found |= set(re.findall(rf"^{MEMORY}/[^/\s]+", os.readlink(each)))
        except OSError:
            continue  # it has ended, or is not ours
    return found
