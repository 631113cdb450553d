"""`scripts/gpu_checks` runs on the stand-in for a GPU, so that the few minutes with a card are not spent on its slips."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import ROOT


@pytest.mark.slow
def test_the_checks_for_a_card_run_without_one(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    parts = ["machine", "preflight"]
    if request.config.option.everything:
        parts += ["pairs", "operations", "training"]
    done = subprocess.run(
        ["bash", "scripts/gpu_checks"],
        cwd=ROOT,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "GPU_STAND_IN": "1",
            "PARTS": " ".join(parts),
            "OUT": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    log = (tmp_path / "checks.log").read_text()
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{log}"
    assert f"gpu_checks: 0 of {len(parts)} parts failed" in done.stdout
    assert "sum of one rank, out of place" in log
