"""Which processes make up a job: `init` and process sets with ranks and with communicators, under plain mpirun."""

from __future__ import annotations

import pytest

from tests.support.jobs import PROGRAMS, mpirun


@pytest.mark.parametrize(
    "program", ["ranks", "communicator", "process_sets", "equal_sets", "strangers", "disagree", "arguments"]
)
def test_parts_of_the_world(program: str) -> None:
    done = mpirun(3, str(PROGRAMS / "part_of_the_world.py"), program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} is done" for rank in range(3)]
