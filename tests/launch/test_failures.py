"""How a training job ends when a rank leaves it: with the core running, under hvdliterun and under plain mpirun."""

from __future__ import annotations

import re
import time

import pytest

from tests.support.jobs import PROGRAMS, PROMPT, Start, mpirun, seconds_since_failure

LEAVES = str(PROGRAMS / "leaves.py")
HANGS = str(PROGRAMS / "hangs.py")


@pytest.mark.parametrize("wait", ["operation", pytest.param("gradients", marks=pytest.mark.weekly)])
@pytest.mark.parametrize(
    ("how", "code"),
    [("exit0", 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("exception", 1), ("exit3", 3)))],
)
def test_hvdliterun(start: Start, how: str, code: int, wait: str) -> None:
    ended = start("-np", "3", "python", LEAVES, how, wait).end()
    assert seconds_since_failure(ended.out, ended.at) < PROMPT
    assert ended.code == code
    assert ended.err.count("failed (exit code") == 1
    if how == "exception":
        assert ended.err.count("Traceback") == 1
        assert ended.err.endswith("ValueError: the reason of rank 1\n")
    elif how == "exit3":
        assert "rank 1 on host" in ended.err
    else:  # rank 1 came to its end too early; those who still need it say so
        awaited = "'the operation': allreduce" if wait == "operation" else "gradient exchange 1"
        assert f"rank 1 has left the job, and this rank still waits for {awaited}" in ended.err


@pytest.mark.costly
@pytest.mark.parametrize("wait", ["operation", "gradients"])
def test_an_endless_loop_ends_at_the_stall_limit(start: Start, wait: str) -> None:
    ended = start("-np", "2", "--stall-check-shutdown-time-seconds", "0.5", "python", LEAVES, "loop", wait).end()
    assert seconds_since_failure(ended.out, ended.at) < PROMPT
    assert ended.code == 1
    assert "rank 1 is missing; it is here:" in ended.err
    assert "time.sleep(0.01)  # the line that rank 1 is on" in ended.err
    assert "the limit for one wait is 0.5 s" in ended.err


def test_a_stall_is_reported_while_the_job_goes_on(start: Start) -> None:
    job = start("-np", "2", "--stall-check-warning-time-seconds", "0.3", "python", LEAVES, "loop", "gradients")
    assert job.process.stderr is not None
    seen = ""
    while "the line that rank 1 is on" not in seen:
        line = job.process.stderr.readline()
        assert line, seen
        seen += line
    assert re.search(r"\[0\] hvdlite: rank 0 has waited \d+ s for gradient exchange 1", seen)
    assert job.process.poll() is None
    job.process.terminate()
    assert job.end().code == 143


@pytest.mark.costly
@pytest.mark.parametrize("how", ["after the last exchange", "while others shut down", "in a thread", "in C code"])
def test_a_rank_that_hangs_while_others_are_at_their_end(start: Start, how: str) -> None:
    """The others wait for it in a watched wait: it is reported with its stack, and it is the one that has failed."""
    limits = ("--stall-check-warning-time-seconds", "0.5", "--stall-check-shutdown-time-seconds", "2")
    ended = start("-np", "3", *limits, "python", HANGS, how).end()
    assert ended.code == 1
    assert re.search(r"^\[0\] hvdlite: rank 0 has waited \d s for the end of all ranks\.$", ended.err, re.MULTILINE)
    assert "rank 2 waits for it too." in ended.err
    last = ended.err.rpartition("hvdliterun: rank 1 on host ")[2]
    assert "the limit for one wait is 2 s" in last
    if how == "in C code":
        assert "rank 1 does not answer: it is stopped, or busy in code that holds Python's lock." in last
        assert re.search(f'File "{HANGS}", line \\d+ in <module>', last), last
    else:
        said = (
            ended.err if how == "in a thread" else last
        )  # then hvdliterun may be the first to have waited long enough
        assert "rank 1 is missing; it is here:" in said
        assert "time.sleep(0.01)  # the line that rank 1 is on" in said
        assert ("thread 'the-one' keeps it" in said) is (how == "in a thread")
        assert re.search(f'File "{HANGS}", line \\d+,? in hang', last)


def test_an_exit_handler_that_keeps_one_rank_is_named_alone_and_ends_the_job_at_the_limit(start: Start) -> None:
    limits = ("--stall-check-warning-time-seconds", "1", "--stall-check-shutdown-time-seconds", "3")
    job = start("-np", "2", *limits, "python", HANGS, "in an exit handler")
    ended = job.end()
    assert ended.code == 1
    note, _, last = ended.err.partition("hvdliterun: rank 1 on host ")
    assert re.search(r"a thread or an exit handler keeps rank 1 \(\S+, pid \d+\)\. It is here:$", note, re.MULTILINE)
    for text in (note, last):
        assert re.search(f'File "{HANGS}", line \\d+ in hang$', text, re.MULTILINE)
    assert "3 s" in last and "rank 0" not in ended.err


@pytest.mark.costly
@pytest.mark.parametrize("wait", ["operation", pytest.param("gradients", marks=pytest.mark.weekly)])
@pytest.mark.parametrize("how", ["exception", "exit3", "exit0"])
def test_plain_mpirun(how: str, wait: str) -> None:
    done = mpirun(2, LEAVES, how, wait)
    assert seconds_since_failure(done.stdout, time.time()) < PROMPT
    assert done.returncode != 0
    if how == "exception":
        assert done.stderr.count("ValueError: the reason of rank 1") == 1
    else:
        assert "rank 1 has left the job" in done.stderr
