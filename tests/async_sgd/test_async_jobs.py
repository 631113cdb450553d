"""How a job with a parameter server ends when a rank leaves it or does not go on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.jobs import PROGRAMS, PROMPT, Start, seconds_since_failure

LEAVES = str(PROGRAMS / "parameter_server_leaves.py")
KERAS_LEAVES = str(PROGRAMS / "keras_parameter_server_leaves.py")
LOSES = str(PROGRAMS / "parameter_server_loses.py")
KERAS_LOSES = str(PROGRAMS / "keras_parameter_server_loses.py")
ALL, LAST = (), ("--servers", "1")
"""Who serves: all ranks, or the last one only."""


@pytest.mark.costly
@pytest.mark.parametrize(
    ("program", "how", "code", "mode", "servers"),
    [
        (LEAVES, "killed", 137, "sync", ALL),
        pytest.param(LEAVES, "exception", 1, "sync", ALL, marks=pytest.mark.weekly),
        pytest.param(KERAS_LEAVES, "exception", 1, "ssp", LAST, marks=pytest.mark.weekly),
    ],
    ids=["torch-killed", "torch-exception", "keras-exception"],
)
@pytest.mark.slow
def test_a_rank_that_fails_ends_the_job(
    start: Start, how: str, code: int, program: str, mode: str, servers: Sequence[str]
) -> None:
    ended = start("-np", "3", *servers, "python", program, how, mode).end()
    assert seconds_since_failure(ended.out, ended.at) < PROMPT
    assert ended.code == code
    assert "rank 1 on host" in ended.err
    if how == "killed":
        assert "was killed by SIGKILL" in ended.err
    else:
        assert ended.err.endswith("ValueError: the reason of rank 1\n")


@pytest.mark.parametrize(("mode", "servers"), [("sync", ALL), pytest.param("ssp", LAST, marks=pytest.mark.weekly)])
@pytest.mark.slow
def test_a_rank_that_does_not_go_on_is_named(start: Start, mode: str, servers: Sequence[str]) -> None:
    limit = ("--stall-check-shutdown-time-seconds", "0.5")
    ended = start("-np", "3", *limit, *servers, "python", LEAVES, "loop", mode).end()
    assert seconds_since_failure(ended.out, ended.at) < PROMPT
    assert ended.code == 1
    assert "rank 1 is missing; it is here:" in ended.err
    assert "time.sleep(0.01)  # the line that rank 1 is on" in ended.err
    assert "a rank whose loop is over calls optimizer.finish()" in ended.err


@pytest.mark.parametrize(
    ("servers", "workers"),
    [pytest.param(ALL, 3, marks=pytest.mark.weekly), pytest.param(LAST, 2, marks=pytest.mark.slow)],
)
def test_a_rank_that_ends_early_lets_the_others_go_on(start: Start, servers: Sequence[str], workers: int) -> None:
    """Nobody calls finish: the end of the program and shutdown do."""
    ended = start("-np", "3", "--no-tag-output", *servers, "python", LEAVES, "end", "async").end()
    assert ended.code == 0, ended.err
    assert ended.out.count(f"rank ends with {10 * (workers - 1) + 5}\n") == 2


@pytest.mark.slow
def test_the_others_go_on_without_workers_that_fail(start: Start, tmp_path: Path) -> None:
    """One is killed, another raises an exception. What they have pushed counts: 20 + 5 + 9, and 1 after a load."""
    path = tmp_path / "values.pt"
    ended = start("-np", "4", *LAST, "--no-tag-output", "python", LOSES, "workers", str(path)).end()
    assert ended.code == 0, ended.out + ended.err
    value = 0.0
    speed = 0.0
    for _ in range(20 + 5 + 9 + 1):
        speed = 0.5 * speed + 1.0
        value += speed
    assert f"rank 0 ends with {value:g} to {value:g}, 1 state\n" in ended.out
    assert "served\n" in ended.out
    assert re.search(
        r"rank 1 has left the job, and .* 'with all ranks'.* it was lost: .* was killed by SIGKILL", ended.out
    )
    first, second = sorted(ended.err.split("hvdliterun: the job has gone on without ")[1:])
    assert re.match(r"rank 1 on host \S+, which failed \(exit code 137\):\nrank 1 .* was killed by SIGKILL\.\n$", first)
    assert re.match(
        r"rank 2 on host \S+, which failed \(exit code 1\):\nTraceback (.*\n)*ValueError: the reason of rank 2\n$",
        second,
    )
    assert not path.exists()


@pytest.mark.slow
def test_the_values_are_saved_when_a_server_is_killed(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "values.pt"
    ended = start("-np", "3", *LAST, "--no-tag-output", "python", LOSES, "server", str(path)).end()
    assert seconds_since_failure(ended.out, ended.at) < PROMPT
    assert ended.code == 137
    assert "rank 2 on host" in ended.err and "was killed by SIGKILL" in ended.err
    assert f"rank 0 has saved the parameters that it pulled last, in {path}.\n" in ended.err
    saved = torch.load(path)
    assert list(saved) == ["weight"]
    last = re.findall(r"pulled (\w+)\n", ended.out)[-1]
    assert hashlib.sha256(saved["weight"].numpy().tobytes()).hexdigest() == last
    assert [each.name for each in tmp_path.iterdir()] == ["values.pt"]


@pytest.mark.weekly
def test_keras_goes_on_without_workers_and_saves_when_the_server_is_killed(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "values.npz"
    ended = start("-np", "4", *LAST, "--no-tag-output", "python", KERAS_LOSES, str(path)).end()
    assert seconds_since_failure(ended.out, ended.at) < PROMPT
    assert ended.code == 137
    assert ended.out.count("has trained\n") == ended.out.count("rank 0 has trained\n") == 1, ended.out + ended.err
    assert "rank 3 on host" in ended.err and "was killed by SIGKILL" in ended.err
    assert f"rank 0 has saved the parameters that it pulled last, in {path}.\n" in ended.err
    with np.load(path) as saved:
        assert [name.rpartition("/")[2] for name in saved] == ["kernel", "bias"] * 2
        found = hashlib.sha256(b"".join(saved[name].tobytes() for name in saved)).hexdigest()
    assert found == re.findall(r"pulled (\w+)\n", ended.out)[-1]
