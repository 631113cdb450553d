"""Checkpoints that are written while the training goes on: `save(..., wait=False)`."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.checkpoint import disk, loading, saving
from hvdlite.errors import CheckpointError
from hvdlite.testing import on_ranks
from tests.support import counted_state
from tests.support.checkpoint_kills import Kills
from tests.support.jobs import ROOT


class SlowDisk:
    """The function `disk.write_file`, which waits for an event; in its place it can fail on one file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: str = "") -> None:
        self.event, self.fails, self.plain = threading.Event(), fails, disk.write_file
        self.running = self.most = 0
        monkeypatch.setattr(disk, "write_file", self)

    def __call__(self, path: Path, chunks: Any) -> disk.FileRecord:
        if path.name == "token":
            return self.plain(path, chunks)
        self.event.wait(20.0)
        if self.fails and self.fails in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.plain(path, chunks)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


class Model:
    """An object with a state, which all ranks have."""

    def __init__(self) -> None:
        self.weights = np.zeros(1000)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights[:] = state["weights"]


def test_what_comes_after_the_call_is_not_in_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowDisk(monkeypatch)

    def work() -> None:
        model = Model()
        for step in (1, 2, 3):
            model.weights += 1.0
            path = hvd.checkpoint.save(tmp_path, model=model, step=step, keep=2, wait=False)
            assert path.name == f"checkpoint-0000000{step}"
            model.weights += hvd.allreduce(np.ones(1000)) * 10.0  # while it is written
            model.weights -= 10.0
            hvd.barrier()
            if step == 1:
                assert not path.exists()
                slow.event.set()
        found = hvd.checkpoint.load(tmp_path, model=model)  # which waits for it
        assert found is not None
        assert (found["step"], set(model.weights)) == (3, {3.0})

    on_ranks(3, work)
    assert names_in(tmp_path) == ["checkpoint-00000002", "checkpoint-00000003"]
    assert names_in(tmp_path / "checkpoint-00000003") == [
        "manifest.json",
        "model.safetensors",
    ]


def test_a_failure_is_told_by_the_next_call_and_the_training_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowDisk(monkeypatch, fails="model.safetensors")
    slow.event.set()

    def work() -> None:
        model = Model()
        hvd.checkpoint.save(tmp_path, step=1, wait=False)
        hvd.checkpoint.save(tmp_path, model=model, wait=False)
        with pytest.raises(
            CheckpointError, match="writing checkpoint-00000002 behind the training: rank 0: OSError: .*No space left"
        ):
            hvd.checkpoint.save(tmp_path, step=3, wait=False)
        found = hvd.checkpoint.load(tmp_path)
        assert found is not None
        assert found["step"] == 1
        hvd.barrier()
        slow.fails = ""
        hvd.checkpoint.save(tmp_path, model=model, wait=False)
        hvd.checkpoint.wait()
        hvd.checkpoint.wait()  # nothing is under way

    on_ranks(2, work)
    assert names_in(tmp_path) == ["checkpoint-00000001", "checkpoint-00000002"]


def test_a_rank_that_does_not_see_the_folder(tmp_path: Path) -> None:
    """Only what a rank has to write matters."""

    def work() -> None:
        folder = tmp_path / ("here" if hvd.rank() == 0 else "elsewhere")
        hvd.checkpoint.save(folder, step=1, wait=False)
        hvd.checkpoint.wait()

    on_ranks(2, work)
    assert names_in(tmp_path / "here") == ["checkpoint-00000001"]


def test_kills_at_random_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was said to be saved is there, whole, whenever a process is killed. `scripts/faults --checkpoints` kills many."""
    for module in (saving, loading):
        monkeypatch.setattr(module, "stateful", module.stateful)  # it is as before after the test
    counted_state.register()
    kills = Kills(tmp_path / "checkpoints", seed=5)
    for number in range(5):
        kills.kill(in_a_job=number == 3)


def test_the_end_of_the_program_waits(tmp_path: Path) -> None:
    program = "import hvdlite as hvd, numpy as np; hvd.init(); "
    program += f"hvd.checkpoint.save({str(tmp_path / 'c')!r}, x=np.ones(5_000_000), wait=False)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert names_in(tmp_path / "c") == ["checkpoint-00000001"]
