"""How a Keras job ends when a callback fails on one rank."""

from __future__ import annotations

import pytest

from tests.support.jobs import PROGRAMS, Start, mpirun

PROGRAM = str(PROGRAMS / "keras_callback_fails.py")


@pytest.mark.parametrize(
    "where", [pytest.param("batch", marks=pytest.mark.slow), pytest.param("epoch", marks=pytest.mark.weekly)]
)
def test_hvdliterun(start: Start, where: str) -> None:
    ended = start("-np", "2", "python", PROGRAM, where).end()
    assert ended.code == 1, ended.err
    assert ended.err.count("Traceback") == 1
    assert ended.err.endswith("ValueError: the reason of rank 1\n")


@pytest.mark.weekly
def test_plain_mpirun() -> None:
    done = mpirun(2, PROGRAM, "batch")
    assert done.returncode != 0
    assert done.stderr.count("ValueError: the reason of rank 1") == 1
