"""The examples do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("size", [1, 2, 3])
def test_digits(size: int) -> None:
    out = run("-m", "hvdlite.launch", "-np", str(size), "python", "examples/torch_digits.py")
    accuracy = re.search(r"test accuracy: ([\d.]+) % of 360 images", out)
    assert accuracy, out
    assert float(accuracy[1]) >= 97
    assert f"weights: identical on {size} rank" in out


def test_algorithms(tmp_path: Path) -> None:
    picture = tmp_path / "algorithms.png"
    out = run("examples/algorithms.py", "--ranks", "4,6", "--sizes", "1K,1M", "--plot", str(picture))
    rows = [line for line in out.splitlines() if "iB" in line]
    assert [row.split()[:3] for row in rows] == [[ranks, "1", unit] for ranks in ("4", "6") for unit in ("KiB", "MiB")]
    for row in rows:
        assert row.count("*") >= 1
        assert row.count("(") == 5  # five algorithms, each with its prediction
    assert picture.read_bytes().startswith(b"\x89PNG")
