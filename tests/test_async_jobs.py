"""How a job with a parameter server ends when a rank leaves it or does not go on."""

from __future__ import annotations

import pytest

from tests.jobs import PROGRAMS, PROMPT, Start, seconds_since_failure

LEAVES = str(PROGRAMS / "parameter_server_leaves.py")


@pytest.mark.parametrize(("mode", "servers"), [("sync", "sharded"), ("ssp", "1")])
@pytest.mark.parametrize(("how", "code"), [("killed", 137), ("exception", 1)])
def test_a_rank_that_fails_ends_the_job(start: Start, how: str, code: int, mode: str, servers: str) -> None:
    ended = start("-np", "3", "python", LEAVES, how, mode, servers).end()
    assert seconds_since_failure(ended.out, ended.at) < PROMPT
    assert ended.code == code
    assert "rank 1 on host" in ended.err
    if how == "killed":
        assert "was killed by SIGKILL" in ended.err
    else:
        assert ended.err.endswith("ValueError: the reason of rank 1\n")


@pytest.mark.parametrize(("mode", "servers"), [("sync", "sharded"), ("ssp", "1")])
def test_a_rank_that_does_not_go_on_is_named(start: Start, mode: str, servers: str) -> None:
    limit = ("--stall-check-shutdown-time-seconds", "0.5")
    ended = start("-np", "3", *limit, "python", LEAVES, "loop", mode, servers).end()
    assert seconds_since_failure(ended.out, ended.at) < PROMPT
    assert ended.code == 1
    assert "rank 1 is missing; it is here:" in ended.err
    assert "time.sleep(0.01)  # the line that rank 1 is on" in ended.err
    assert "a rank whose loop is over calls optimizer.finish()" in ended.err


@pytest.mark.parametrize(("servers", "workers"), [("sharded", 3), ("1", 2)])
def test_a_rank_that_ends_early_lets_the_others_go_on(start: Start, servers: str, workers: int) -> None:
    """Nobody calls finish: the end of the program and shutdown do."""
    ended = start("-np", "3", "--no-tag-output", "python", LEAVES, "end", "async", servers).end()
    assert ended.code == 0, ended.err
    assert ended.out.count(f"rank ends with {10 * (workers - 1) + 5}\n") == 2
