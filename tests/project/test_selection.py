"""Which tests a run has, and that a run which leaves something behind fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import selection
from tests.support.jobs import ROOT

SUITE = """
import pytest

def test_quick(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.weekly
def test_weekly(): pass

@pytest.mark.costly
@pytest.mark.parametrize("case", [1, 2, 3])
def test_costly(case): pass

def test_leaves(tmp_path):
    import tempfile
    if {leaves}: tempfile.mkdtemp(prefix="hvdlite-")
"""
PLUGINS = "from tests.support import selection\nfrom tests.conftest import *\n"


def run(folder: Path, *options: str, leaves: bool = False) -> tuple[int, list[str], str]:
    """Run a small suite with our conftest. Returns the exit code, the names of what has passed, and the output."""
    (folder / "conftest.py").write_text(PLUGINS)
    (folder / "test_small.py").write_text(SUITE.replace("{leaves}", str(leaves)))
    markers = "\n ".join(["slow: x", "costly: x", "weekly: x"])
    (folder / "pytest.ini").write_text(f"[pytest]\nmarkers =\n {markers}\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **({"HVDLITE_TESTS_ALONE": "1"} if leaves else {})},
        capture_output=True,
        text=True,
        timeout=120,
    )
    passed = [line.split("::")[1].split()[0] for line in done.stdout.splitlines() if " PASSED" in line]
    return done.returncode, passed, done.stdout + done.stderr


@pytest.mark.slow
def test_parts_and_what_is_left(tmp_path: Path) -> None:
    code, quick, out = run(tmp_path)
    assert (code, quick) == (0, ["test_quick", "test_costly[1]", "test_leaves"]), out
    code, rest, out = run(tmp_path, "--rest")
    assert (code, rest) == (0, ["test_slow", "test_costly[2]", "test_costly[3]"]), out
    code, both, out = run(tmp_path, "test_small.py", leaves=True)
    assert sorted(both) == sorted(quick + rest), out
    assert "test_weekly" in run(tmp_path, "--everything")[1]
    assert code == 1
    assert "left behind: $TMPDIR/hvdlite-" in out


@pytest.mark.parametrize("part", selection.PARTS["everything"])
def test_durations_name_files_that_are_there(part: str) -> None:
    """Run ``pytest -n 2 --everything --renew-durations``, or delete the line of a file that has gone."""
    for unit in json.loads(selection.DURATIONS.read_text())[part]:
        assert (ROOT / unit.partition("::")[0]).exists(), unit
