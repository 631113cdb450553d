"""hvdliterun: real jobs, each with a hard time limit, and the parts that need no process."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from hvdlite.errors import LaunchError
from hvdlite.launch import cli
from hvdlite.launch.job import departure, failures, ranks, ssh
from hvdlite.launch.job.departure import Departure
from hvdlite.launch.job.failures import Failure
from hvdlite.launch.job.hosts import Host, check_slots, is_local, parse_hostfile, parse_hosts
from hvdlite.launch.job.mpi import (
    Mpi,
    Placement,
    command,
    find_mpi,
    parse_version,
    split_interpreter_options,
    without_worker,
    worker_command,
)
from hvdlite.launch.job.mpi_process import MpiProcess
from hvdlite.launch.job.output import Output, Sink
from hvdlite.launch.job.ranks import Rank
from hvdlite.launch.job.reports import Reports
from hvdlite.launch.worker import shared_memory, worker
from hvdlite.launcher_link.server import ControlConnection, ControlServer
from hvdlite.launcher_link.session import Message
from tests.support import innocent
from tests.support.jobs import LIMIT, PROGRAMS, PROMPT, Start, Started, seconds_since_failure, wait_for


def assert_swept(job: Started, before: set[str]) -> None:
    """Neither Open MPI's directory of this job is left, nor a segment of MPICH's that nobody uses."""
    left = set(os.listdir("/dev/shm")) - before
    assert not [name for name in left if name.startswith(f"hvdlite.{job.process.pid}.")]
    for name in left:
        assert not name.startswith("mpich_shm_") or is_mapped(f"/dev/shm/{name}"), name


def is_mapped(path: str) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if path in maps.read_text():
                return True
        except OSError:
            continue
    return False


# ---- jobs that end well ----


def test_two_ranks_meet(start: Start) -> None:
    before = set(os.listdir("/dev/shm"))
    job = start("-np", "2", str(PROGRAMS / "meet.py"))
    ended = job.end()
    assert (ended.code, ended.err) == (0, "")
    assert {"[0] met 0 of 2", "[1] met 1 of 2"} <= set(ended.out.splitlines())
    assert_swept(job, before)


def test_one_rank_is_not_tagged(start: Start) -> None:
    ended = start("-np", "1", str(PROGRAMS / "meet.py")).end()
    assert ended.code == 0 and ended.out.splitlines()[-1] == "met 0 of 1"


def test_more_ranks_than_cores(start: Start) -> None:
    ended = start("-np", "4", "--no-tag-output", str(PROGRAMS / "meet.py")).end()
    assert ended.code == 0
    assert sorted(line for line in ended.out.splitlines() if "met" in line) == [f"met {n} of 4" for n in range(4)]


def test_localhost_is_no_other_host(start: Start) -> None:
    ended = start("-np", "2", "-H", "localhost:1,127.0.0.1:1", str(PROGRAMS / "meet.py")).end()
    assert (ended.code, ended.err) == (0, "")


@pytest.mark.costly
@pytest.mark.parametrize(
    ("words", "argv", "path0"),
    [
        (["show.py", "a b", "-x"], ["show.py", "a b", "-x"], str(PROGRAMS)),
        (["python", "-u", "show.py", "--"], ["show.py", "--"], str(PROGRAMS)),
        (["python", "-m", "show", "-m"], [str(PROGRAMS / "show.py"), "-m"], str(PROGRAMS)),
        (["python", "-c", "import runpy; runpy.run_path('show.py', run_name='__main__')", "q"], None, ""),
    ],
    ids=["script", "python", "module", "code"],
)
def test_program_sees_what_python_shows(start: Start, words: list[str], argv: list[str] | None, path0: str) -> None:
    env = {"WITH_SPACES": "a 'b'\n\"c\""}
    ended = start("-np", "1", "--fusion-threshold-mb", "2", *words, env=env, cwd=PROGRAMS).end()
    assert (ended.code, ended.err) == (0, "")
    facts = json.loads(ended.out)
    assert argv is None or facts["argv"] == argv
    assert facts["path0"] == path0
    assert facts["name"] == "__main__"
    assert argv is None or facts["main"]
    assert (facts["stdin"], facts["threshold"], facts["spaces"]) == ("", str(2 << 20), env["WITH_SPACES"])


def test_other_commands(start: Start) -> None:
    ended = start("-np", "2", "sh", "-c", "echo hi $OMPI_COMM_WORLD_SIZE$PMI_SIZE").end()
    assert (ended.code, sorted(ended.out.splitlines()), ended.err) == (0, ["[0] hi 2", "[1] hi 2"], "")


@pytest.mark.slow
def test_ranks_share_the_cores(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    for size in (2, cores + 1):
        share = max(1, cores // size)
        ended = start("-np", str(size), "--verbose", "sh", "-c", "echo share $OMP_NUM_THREADS").end()
        assert ended.code == 0
        assert ended.out.count(f"share {share}\n") == size
        assert ended.err.count(f"OMP_NUM_THREADS={share}, its share") == size
    ended = start(
        "-np", "2", "--verbose", "sh", "-c", "echo share $OMP_NUM_THREADS", env={"OMP_NUM_THREADS": "7"}
    ).end()
    assert ended.out.count("share 7\n") == 2 and "its share" not in ended.err


def test_spawned_children_import_the_program(start: Start) -> None:
    ended = start("-np", "1", str(PROGRAMS / "spawns.py")).end()
    assert (ended.code, ended.out, ended.err) == (0, "[9]\n", "")


def test_lines_stay_whole_and_on_their_stream(start: Start, tmp_path: Path) -> None:
    words = ["-np", "2", "--output-filename", str(tmp_path / "out"), str(PROGRAMS / "lines.py")]
    ended = start(*words, env={"HVDLITE_ADVICE": "0"}).end()
    assert ended.code == 0
    for name, text in (("stdout", ended.out), ("stderr", ended.err)):
        for rank in "01":
            expected = [f"<{name}> {number} {rank * 3000}" for number in range(300)]
            lines = [line.removeprefix(f"[{rank}] ") for line in text.splitlines() if line.startswith(f"[{rank}] ")]
            assert lines == expected
            assert (tmp_path / "out" / f"rank.{rank}" / name).read_text().splitlines() == expected
        assert len(text.splitlines()) == 600


@pytest.mark.slow
def test_nothing_of_many_last_words_is_lost(start: Start) -> None:
    """A rank ends with more unread output than any buffer holds."""
    ended = start("-np", "1", "python", "-c", "print('12345\\n' * 2_000_000, end='')").end()
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == "12345\n" * 2_000_000
    ended = start("-np", "4", "python", "-c", "print('x' * 79 + '\\n' + 'y' * 2_000_000)").end()
    assert ended.code == 0
    assert ended.err.startswith("hvdliterun: each of the 4 ranks has run the whole program alone: none has called")
    assert len(ended.err.splitlines()) == 1
    expected = [f"[{rank}] {line}" for rank in range(4) for line in ("x" * 79, "y" * 2_000_000)]
    assert sorted(ended.out.splitlines()) == sorted(expected)


def test_a_reader_that_pauses_makes_the_ranks_wait(start: Start) -> None:
    job = start("-np", "1", str(PROGRAMS / "flood.py"), str(1 << 26))
    assert job.process.stdout is not None and job.process.stderr is not None
    full_after = int(job.process.stderr.readline())  # of 64 MiB, while nobody reads
    assert full_after < 1 << 24
    assert job.process.stdout.read() == ("." * 1023 + "\n") * (1 << 16)
    assert job.process.wait(LIMIT) == 0


def test_full_disks_end_the_copying_not_the_job(start: Start, tmp_path: Path) -> None:
    (tmp_path / "rank.0").mkdir()
    (tmp_path / "rank.0" / "stdout").symlink_to("/dev/full")
    ended = start("-np", "2", "--output-filename", str(tmp_path), "sh", "-c", "echo one; echo two").end()
    assert (ended.code, ended.out.count("one")) == (0, 2)
    assert ended.err.count("No space left on device; output is not kept there any more, the job goes on.") == 1
    assert (tmp_path / "rank.1" / "stdout").read_text() == "one\ntwo\n"
    done = launch_by_shell("exec {} -np 2 sh -c 'echo one; echo two; echo three >&2' > /dev/full")
    assert done.returncode == 0
    assert "stdout: No space left on device; the ranks' output is not shown any more, the job goes on." in done.stderr
    assert done.stderr.count("three") == 2


@pytest.mark.costly
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(closed: str) -> None:
    done = launch_by_shell("exec {} -np 2 sh -c 'echo out; echo err >&2; exit 3' " + closed)
    assert done.returncode == 3
    assert done.stdout.count("out") == (0 if " >&-" in f" {closed}" else 2)
    assert "Traceback" not in done.stderr


def test_limits_of_open_files() -> None:
    assert launch_by_shell("ulimit -Sn 100; exec {} -np 2 sh -c true").returncode == 0
    done = launch_by_shell("ulimit -n 100; exec {} -np 2 sh -c true")
    assert (
        done.returncode == 2 and "needs 194 open files in hvdliterun, and the limit is 100 (ulimit -Hn)" in done.stderr
    )


def launch_by_shell(line: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", line.format(f"{sys.executable} -m hvdlite.launch")]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)


# ---- jobs in which a rank fails ----

FAILURES = {
    "exception": (1, "ValueError: the reason of rank 1"),
    "exit3": (3, "ended with exit code 3"),
    "exit-message": (1, "the message of rank 1"),
    "segfault": (139, "was killed by SIGSEGV"),
    "SIGKILL": (137, "was killed by SIGKILL"),
    "SIGTERM": (143, "was killed by SIGTERM"),
    "SIGSTOP": (147, "is stopped (SIGSTOP)"),
    "_exit7": (7, "ended with exit code 7"),
    "_exit0": (1, "ended without finishing"),
}


@pytest.mark.costly
@pytest.mark.parametrize("how", FAILURES)
def test_rank_fails(start: Start, how: str) -> None:
    before = set(os.listdir("/dev/shm"))
    job = start("-np", "2", str(PROGRAMS / "fail.py"), how, env={"HVDLITE_STOPPED_SECONDS": "1.5"})
    ended = job.end()
    code, words = FAILURES[how]
    assert seconds_since_failure(ended.out, ended.at) < PROMPT
    assert ended.code == code
    assert "[1] last words without newline\n" in ended.out
    # The reason, and nothing else: neither mpirun's words nor another rank's.
    first, reason = ended.err.split("\n", 1)
    assert re.fullmatch(rf"hvdliterun: rank 1 on host \S+ failed \(exit code {code}\):", first)
    assert reason.count(words) == 1
    if how == "exception":
        assert reason.startswith("Traceback (most recent call last):\n")
        assert reason.endswith(words + "\n")
        assert re.findall(r"in (\S+)$", reason, re.M) == ["<module>", "deepest"]
    elif how in ("segfault", "SIGSTOP"):  # with the stack
        assert "fail.py" in reason and "worker.py" not in reason
    else:
        assert len(reason.splitlines()) == 1
    assert not job.processes()
    assert_swept(job, before)


def test_abort(start: Start) -> None:
    ended = start("-np", "2", str(PROGRAMS / "fail.py"), "abort").end()
    assert ended.code == 5


def test_abort_beside_a_stubborn_rank(start: Start) -> None:
    """The MPI launcher kills the guard of a rank that does not go: that is no reason."""
    code = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); from mpi4py import MPI; "
    code += "MPI.COMM_WORLD.rank or MPI.COMM_WORLD.Abort(5); time.sleep(60)"
    assert start("-np", "2", "python", "-c", code).end().code == 5


def test_all_ranks_fail_and_one_is_printed(start: Start) -> None:
    ended = start("-np", "4", str(PROGRAMS / "twice.py")).end()
    assert ended.code == 1
    assert ended.err.count("Traceback") == 1 and ended.err.count("KeyError: 'rank ") == 1


def test_killed_rank_with_a_forked_copy(start: Start) -> None:
    ended = start("-np", "2", str(PROGRAMS / "forks.py")).end()
    failed_at = re.search(r"failing at ([\d.]+)", ended.out)
    assert failed_at is not None and ended.at - float(failed_at[1]) < PROMPT
    assert ended.code == 137


@pytest.mark.costly
@pytest.mark.parametrize("how", ["well", "badly", "guard"])
def test_what_a_rank_left_behind_ends_with_it(start: Start, how: str) -> None:
    job = start("-np", "2", str(PROGRAMS / "leaves_behind.py"), "well" if how == "well" else "waits")
    (rank, guard), _ = job.ready(2)
    if how != "well":
        os.kill(rank if how == "badly" else guard, signal.SIGKILL)
    ended = job.end()
    assert ended.code == (0 if how == "well" else 137)
    assert not job.processes()


def test_crash_while_exiting(start: Start) -> None:
    ended = start("-np", "1", str(PROGRAMS / "late.py")).end()
    assert ended.code == 139
    assert "was killed by SIGSEGV while it was exiting, after its program had finished" in ended.err


def test_other_command_fails(start: Start) -> None:
    ended = start("-np", "2", "sh", "-c", "test 0 = $OMPI_COMM_WORLD_RANK$PMI_RANK && sleep 60; exit 9").end()
    assert ended.code == 9
    assert ended.err.startswith("hvdliterun: rank 1 on host ")


def test_traceback_of_a_program_that_does_not_compile(start: Start, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = (\n")
    ended = start("-np", "2", str(tmp_path / "bad.py")).end()
    assert ended.code == 1
    assert ended.err.count("SyntaxError") == 1 and "worker.py" not in ended.err


def test_reported_failure_is_printed(start: Start) -> None:
    code = "import os; from hvdlite.launcher_link.link import report_failure; from hvdlite.config import Config; "
    code += "print(report_failure(Config.from_env().control, 0, 'rank 0 waited for rank 1', 21)); os._exit(4)"
    ended = start("-np", "1", "python", "-c", code).end()
    assert (ended.code, ended.out) == (21, "True\n")
    assert ended.err.splitlines()[1:] == ["rank 0 waited for rank 1"]


# ---- ended from outside ----


@pytest.mark.costly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_the_job(start: Start, number: signal.Signals) -> None:
    job = start("-np", "2", str(PROGRAMS / "meet.py"), "/nowhere")
    job.ready(2)
    sent = time.time()
    job.process.send_signal(number)
    ended = job.end()
    assert ended.at - sent < PROMPT
    assert ended.code == 128 + number
    assert ended.err == f"hvdliterun: ended by {number.name}.\n"
    assert not job.processes()


def test_second_interrupt_kills_at_once(start: Start) -> None:
    job = start("-np", "2", str(PROGRAMS / "stubborn.py"))
    job.ready(2)
    sent = time.time()
    job.process.send_signal(signal.SIGINT)

    # Signals merge while one is pending, so: again and again, as an impatient user does.
    def press() -> bool:
        job.process.send_signal(signal.SIGINT)
        return job.process.poll() is not None

    wait_for(press, LIMIT)
    ended = job.end()
    assert ended.at - sent < 2
    assert ended.code == 130
    job.wait_until_gone(1)


def test_stubborn_ranks_are_killed(start: Start) -> None:
    job = start("-np", "2", str(PROGRAMS / "stubborn.py"))
    (rank, _), _ = job.ready(2)
    sent = time.time()
    os.kill(rank, signal.SIGKILL)
    ended = job.end()
    assert ended.at - sent < PROMPT
    assert ended.code == 137


HELPERS = {
    ("hvdliterun", signal.SIGKILL): (-9, ""),
    ("mpirun", signal.SIGKILL): (137, "was killed by SIGKILL before all ranks had finished"),
    ("mpirun", signal.SIGTERM): (143, "was ended by a signal such as SIGTERM"),
    ("guard", signal.SIGKILL): (
        137,
        r"the guard process of rank \d \(.*\), pid {guard}, was killed, and the rank with it",
    ),
    ("guard", signal.SIGTERM): (143, r"the guard process of rank \d \(.*\), pid {guard}, got a SIGTERM"),
}


@pytest.mark.costly
@pytest.mark.parametrize(("victim", "number"), HELPERS)
def test_killed_helper_leaves_nothing(start: Start, victim: str, number: signal.Signals) -> None:
    before = set(os.listdir("/dev/shm"))
    gentle = number == signal.SIGTERM
    job = start("-np", "2", *([str(PROGRAMS / "meet.py"), "/nowhere"] if gentle else [str(PROGRAMS / "stubborn.py")]))
    (_, guard), _ = job.ready(2)
    children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    pid = {"hvdliterun": job.process.pid, "mpirun": int(children[0]), "guard": guard}[victim]
    sent = time.time()
    os.kill(pid, number)
    ended = job.end()
    assert ended.at - sent < PROMPT
    code, words = HELPERS[victim, number]
    assert ended.code == code
    assert re.search(words.replace("{guard}", str(guard)), ended.err)
    job.wait_until_gone(PROMPT)
    assert_swept(job, before)


def test_pause_of_a_rank_alone_counts(start: Start, tmp_path: Path) -> None:
    job = start("-np", "2", str(PROGRAMS / "meet.py"), str(tmp_path / "go"))
    (rank, _), _ = job.ready(2)
    os.kill(rank, signal.SIGSTOP)
    os.kill(rank, signal.SIGCONT)
    (tmp_path / "go").touch()
    assert job.end().code == 0


def connection_of(**fields: Any) -> ControlConnection:
    """A connection to a guard that is nowhere."""
    made = types.SimpleNamespace(rank=None, is_local=False, **fields)
    made.belongs_to = lambda rank: setattr(made, "rank", rank)
    return cast(ControlConnection, made)


def test_a_pause_of_five_seconds_is_no_failure() -> None:
    known = ranks.Ranks(1)
    sent: list[str] = []
    known.add(connection_of(send=lambda kind, **_: sent.append(kind)), {"rank": 0, "host": "h", "pid": 7, "guard": 6})
    known[0].stopped_at = now = time.monotonic()
    assert known.stopped(now + 5.0, suspended=False) == [] and sent == []
    assert known.stopped(now + 10.1, suspended=False) == [] and sent == ["show"]


def test_a_setting_that_cannot_be_read_is_said_before_the_job_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HVDLITE_STOPPED_SECONDS", "soon")
    assert cli.main(["-np", "1", str(PROGRAMS / "show.py")]) == cli.USAGE_ERROR
    assert capsys.readouterr().err == "hvdliterun: HVDLITE_STOPPED_SECONDS='soon': expected float.\n"


@pytest.mark.weekly
@pytest.mark.timeout(300)
def test_false_alarms() -> None:
    """One job of each kind; all at once, as they wait most of the time."""
    jobs = innocent.choose(1, len(innocent.KINDS))
    with ThreadPoolExecutor(len(jobs)) as pool:
        assert dict(zip(jobs, pool.map(innocent.Innocent.run, jobs), strict=True)) == {job: [] for job in jobs}


@pytest.mark.parametrize("last", ["exit", "failed"])
def test_rank_that_ends_while_it_shows_its_stack_was_stopped(last: str) -> None:
    """A stopped rank runs for a moment to write its stack. If it ends in that moment, it was stopped all the same."""
    sent: list[str] = []
    connection = connection_of(send=lambda kind, **_: sent.append(kind))
    known, told = ranks.Ranks(1), list[str]()
    output = cast(Output, None)  # nobody prints
    take = Reports(
        known, output, lambda text, *_, **__: told.append(text), function=b"", verbose=False, try_host=str
    ).take
    take(connection, Message("hello", {"rank": 0, "host": "here", "pid": 7, "guard": 6, "threads": None}, b""))
    take(connection, Message("stopped", {"signal": signal.SIGSTOP}, b""))
    later = time.monotonic() + 60
    assert known.stopped(later, suspended=False) == [] and sent == ["show"]
    take(connection, Message("continued", {}, b""))
    if last == "failed":
        take(connection, Message("failed", {"text": "", "code": 3, "error": ""}, b""))
    take(connection, Message("exit", {"status": -11, "finished": False, "trace": "", "time": 0.0}, b""))
    assert known.stopped(later, suspended=False) == [known[0]] and told == []


@pytest.mark.parametrize("closed", [True, False])
def test_a_host_that_does_not_answer_is_told_from_a_guard_that_was_killed(closed: bool) -> None:
    known, told = ranks.Ranks(2), list[tuple[str, bool]]()

    def fail(text: str, *_: object, consequence: bool = False, **__: object) -> None:
        told.append((text, consequence))

    def tried(address: str) -> str:
        return f"a try of {address}"

    take = Reports(known, cast(Output, None), fail, function=b"", verbose=False, try_host=tried).take
    connections = []
    for rank in range(2):
        connection = connection_of(peer="10.0.0.7", send=print)
        take(connection, Message("hello", {"rank": rank, "host": "n7", "pid": 7, "guard": 6, "threads": None}, b""))
        connections.append(connection)
    take(connections[1], Message("gone", {"closed": closed}, b""))
    ((text, consequence),) = told
    assert not consequence
    if closed:
        assert text == "the guard process of rank 1 (n7, pid 7), pid 6, was killed, and the rank with it."
    else:
        assert re.fullmatch(
            r"host n7 \(10\.0\.0\.7\) does not answer any more, since about \d\d:\d\d:\d\d: it has no power, or the network "
            r"to it is cut\. ranks 0-1 were there\. Tried: the connection of the guard of rank 1 \(n7, pid 7\), for about "
            r"5 s; and a try of 10\.0\.0\.7\.",
            text,
        ), text


def test_what_strangers_at_the_ports_of_mpirun_cause_is_said_once() -> None:
    line = (
        "[vm:17684] PMIX ERROR: PMIX_ERR_BAD_PARAM in file /x/src/mca/ptl/base/ptl_base_connection_hdlr.c at line 227"
    )
    other = "[vm:17684] PMIX ERROR: PMIX_ERR_BAD_PARAM in file /x/src/server/pmix_server.c at line 3"
    screen, server = Screen(), ControlServer("127.0.0.1")
    output = Output(Screen(), screen, tagged=False)
    words = ["/bin/printf", f"{line}\n{other}\n{line}\n"]
    process = MpiProcess(words, os.environ, server, output, verbose=False)
    while process.status is None:
        for descriptor in server.poll(1.0)[1]:
            process.read(descriptor)
    process.release_banner(everything=True)
    process.tell_of_strangers()
    process.sweep()
    server.close()
    output.close()
    assert screen.got.decode().splitlines() == [
        other,
        "hvdliterun: printf has refused 2 connections from outside of this job to its own ports; the job is not affected.",
    ]


def test_what_comes_of_a_try_of_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert ssh.try_port(port, "127.0.0.1") == f"port {port} of it, that of ssh, which answers: so it is up now"
    assert "refused a connection: so it is up now" in ssh.try_port(port, "127.0.0.1")


def test_reader_that_leaves_ends_the_job(start: Start) -> None:
    job = start("-np", "2", "sh", "-c", "while echo y; do :; done")
    assert job.process.stdout is not None and job.process.stderr is not None
    job.process.stdout.read(10)
    job.process.stdout.close()
    assert job.process.wait(LIMIT) == 141
    assert "nobody reads the output" in job.process.stderr.read()


# ---- bad input ----


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-np", "0", "x.py"], "'0' is not a whole number from 1 on"),
        (["-np", "-3", "x.py"], "-np"),
        (["-np", "two", "x.py"], "'two' is not a whole number from 1 on"),
        (["-np", "2"], "Give a command"),
        (["x.py"], "Give -np N"),
        (["-np", "2", "nosuch.py"], "no script 'nosuch.py'"),
        (["-np", "2", "python", "nosuch.py"], "no script 'nosuch.py'"),
        (["-np", "2", "python"], "no script, -m module or -c code"),
        (["-np", "2", "nosuchprogram"], "no program 'nosuchprogram'"),
        (["-np", "3", "-H", "localhost:2", "true"], "has only 2 slots"),
        (["-np", "2", "-H", "localhost:x", "true"], "'x' slots for localhost"),
        (["-np", "2", "-H", "a:1,,b", "true"], "'' is not a host name"),
        (["-np", "2", "-H", "a:" + "9" * 5000, "true"], "expected a whole number from 1 to 999999"),
        (["-np", "9" * 5000, "true"], "is not a whole number from 1 on"),
        (["-np", "1000000000", "true"], "this machine has memory for "),
        (["-np", "2", "--mpi-args='--mca", "true"], "No closing quotation. Write it as for a shell"),
        (["-np", "2", "--hostfile", "nosuchfile", "true"], "cannot read the hostfile nosuchfile"),
        (["-np", "2", "-H", "nosuchhost.invalid:2", "true"], "Try: ssh nosuchhost.invalid true"),
    ],
)
def test_bad_input(start: Start, arguments: list[str], words: str) -> None:
    ended = start(*arguments).end()
    assert ended.code == 2
    assert words in ended.err.splitlines()[-1]
    assert "Traceback" not in ended.err and ended.out == ""


def test_no_job_inside_a_job(start: Start) -> None:
    ended = start("-np", "1", "true", env={"HVDLITE_CONTROL": "h:1:t"}).end()
    assert ended.code == 2 and "already a rank of a job" in ended.err


def test_ranks_that_do_not_start(start: Start) -> None:
    ended = start("-np", "2", "--start-timeout", "0.001", "sleep", "60").end()
    assert ended.code == 1
    assert re.search(r"rank [01, ]+ did not start within 0.001 s", ended.err)


def test_environments_that_cannot_work() -> None:
    words = ["env", "-u", "HOME", sys.executable, "-m", "hvdlite.launch", "-np", "2", "true"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 2
    if find_mpi().flavour == "openmpi":
        assert "Unable to get the user home directory" in done.stderr and "HOME is not set" in done.stderr
    worker_alone = [sys.executable, worker.__file__, "-c", "pass"]
    for control, words_ in ((None, "got no HVDLITE_CONTROL"), ("garbage", "is not host:port:secret")):
        environ = {**os.environ, "OMPI_COMM_WORLD_RANK": "0"}
        if control:
            environ["HVDLITE_CONTROL"] = control
        done = subprocess.run(worker_alone, capture_output=True, text=True, timeout=LIMIT, env=environ)
        assert done.returncode == 1 and words_ in done.stderr and "Traceback" not in done.stderr


def test_launcher_that_refuses_has_the_last_word(start: Start) -> None:
    ended = start("-np", "2", "--mpi-args=--no-such-option-of-mpirun", "true").end()
    assert ended.code != 0
    assert "before 2 of the ranks had started" in ended.err and "no-such-option-of-mpirun" in ended.err


def test_check_build(start: Start) -> None:
    ended = start("--check-build").end()
    assert ended.code == 0
    assert "[X] launcher: " in ended.out and "[X] library: " in ended.out
    assert "[X] calls from several threads: MULTIPLE" in ended.out
    assert "NCCL" in ended.out and "PyTorch" in ended.out
    assert "[X] gradients of the ranks of a host: in memory that they share (memfd)" in ended.out
    assert "] pages of torch's tensors of 2 MiB and more: " in ended.out


HOROVODRUN = """--gloo --mpi --tcp --disable-cache --cycle-time-ms 1 --cache-capacity 1024 --log-level INFO --no-autotune
    --hierarchical-allreduce --num-nccl-streams 2 --thread-affinity 1 --log-hide-timestamp -prefix-timestamp --no-stall-check"""


def test_launch_lines_of_horovodrun(start: Start) -> None:
    words = [*HOROVODRUN.split(), "--binding-args=--map-by slot", "-np", "2", "--mpi", "sh", "-c", "echo out"]
    ended = start(*words).end()
    assert ended.code == 0
    assert sorted(re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[(\d)\] out$", ended.out, re.M)) == ["0", "1"]
    assert "hvdliterun: --gloo: no effect, there is no Gloo, ranks speak by MPI.\n" in ended.err
    assert ended.err.count("no effect") == ended.err.count("\n")
    for flag in ("--config-file=x.yaml", "--jsrun"):
        refused = start("-np", "2", flag, "true").end()
        assert refused.code == 2 and f"{flag.partition('=')[0]} is horovodrun's: " in refused.err


@pytest.mark.parametrize("words", [["hvdlite.launch"], ["hvdlite"]])
def test_version(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *words, "--version"], capture_output=True, text=True, timeout=LIMIT, check=True
    )
    assert done.stdout == f"{importlib.metadata.version('hvdlite')}\n"


# ---- parts ----


def test_hosts() -> None:
    assert parse_hosts("a:2,10.0.0.1") == [Host("a", 2), Host("10.0.0.1", 1)]
    check_slots([Host("a", 2)], 2, "me", "")
    assert is_local("localhost") and is_local("127.0.0.1") and not is_local("192.0.2.1")


def test_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# mine\nnode1 slots=4\n\nnode2 slots=2 # slow\nnode3\n")
    assert parse_hostfile(str(path)) == [Host("node1", 4), Host("node2", 2), Host("node3", 1)]
    path.write_text("node1 slots = 4 max_slots=8\nnode2:2\nnode3 max-slots = 1\n")
    assert parse_hostfile(str(path)) == [Host("node1", 4), Host("node2", 2), Host("node3", 1)]
    path.write_text("node1 slots=4\nnode2 4\n")
    with pytest.raises(LaunchError, match="line 2: 'node2 4'; expected 'host slots=N'"):
        parse_hostfile(str(path))
    path.write_text("\n")
    with pytest.raises(LaunchError, match="names no host"):
        parse_hostfile(str(path))


def test_versions() -> None:
    assert parse_version("m", "mpirun (Open MPI) 5.0.11\n\nReport") == Mpi("openmpi", "m", (5, 0, 11))
    hydra = "HYDRA build details:\n    Version:                                 5.0.2\n"
    assert parse_version("m", hydra) == Mpi("mpich", "m", (5, 0, 2))
    assert parse_version("m", "something else 1.0") is None


def test_command_on_one_host() -> None:
    words = command(Mpi("openmpi", "mpirun", (5, 0)), Placement(2, mpi_args="--x 'a b'"), ["A"], ["prog"])
    text = " ".join(words)
    assert words[0] == "mpirun" and words[-3:] == ["-np", "2", "prog"]
    assert "--mca pml ob1 --mca btl self,sm " in text and "--bind-to none" in text
    assert "-x" not in words and "-H localhost:2 " in text and "a b" in words
    assert command(Mpi("mpich", "mpiexec", (5,)), Placement(2), ["A"], ["prog"]) == [
        *("mpiexec", "-launcher", "fork", "-hosts", "localhost:2", "-np", "2", "prog")
    ]


def test_command_on_several_hosts() -> None:
    there = Placement(
        4, (Host("192.0.2.1", 2), Host("192.0.2.2", 2)), interfaces="eth1", ssh_port=2222, ssh_identity_file="k"
    )
    text = " ".join(command(Mpi("openmpi", "mpirun", (5, 0)), there, ["A", "PWD", "OMPI_X"], ["prog"]))
    assert "-H 192.0.2.1:2,192.0.2.2:2" in text and "--prtemca plm_ssh_args -p 2222 -i k" in text
    assert "--mca btl_tcp_if_include eth1" in text and "-x A " in text and "PWD" not in text and "OMPI_X" not in text
    assert "--mca btl_tcp_flags 1 " in text  # else ranks that send to each other do so in turns
    assert "oob_tcp_keepalive_time 2" in text and "pml ob1" not in text
    assert "--mca plm_rsh_args" in " ".join(command(Mpi("openmpi", "mpirun", (4, 1)), there, [], ["prog"]))
    text = " ".join(command(Mpi("mpich", "mpiexec", (5,)), there, [], ["prog"], address="192.0.2.9"))
    assert "-launcher ssh -localhost 192.0.2.9 -hosts 192.0.2.1:2,192.0.2.2:2 -iface eth1" in text


@pytest.mark.parametrize(
    ("words", "options", "rest"),
    [
        (["x.py", "-m"], [], ["x.py", "-m"]),
        (["-u", "-W", "error", "x.py"], ["-u", "-W", "error"], ["x.py"]),
        (["-um", "pkg", "-c"], ["-u"], ["-m", "pkg", "-c"]),
        (["-Xdev", "-cprint()"], ["-X", "dev"], ["-c", "print()"]),
    ],
)
def test_interpreter_options(words: list[str], options: list[str], rest: list[str]) -> None:
    assert split_interpreter_options(words) == (options, rest)


def test_python_means_this_one() -> None:
    assert worker_command(["python", "-m", "json"])[0] == sys.executable
    assert worker_command(["true"])[2:] == ["--exec", "true"]
    assert without_worker(worker_command(["true", "x"])) == ["true", "x"]
    assert without_worker(worker_command(["python", "-um", "json", "-h"]))[1:] == ["-u", "-m", "json", "-h"]


def test_first_failure() -> None:
    cause, effect = Failure("cause", 3, at=2.0, rank=1), Failure("effect", 1, at=1.0, rank=0, consequence=True)
    later = Failure("later", 1, at=3.0, rank=2)
    assert failures.first([effect, later, cause]) is cause
    assert failures.first([effect]) is effect
    assert failures.exit_code(-9) == 137 and failures.signal_name(64) in ("SIGRTMAX", "signal 64")


def test_ranks_on_a_busy_machine_may_take_long_to_go() -> None:
    """What counts is the time that they could have used."""

    connection = cast(ControlConnection, None)
    known = [Rank(number, connection, "here", pid=number, guard=9, local=True) for number in range(2)]
    waited = {0: 5.0, 1: 7.0}
    departure = Departure(known, 100.0, waited.__getitem__)
    assert departure.seconds(known, 103.0) == 3.0
    waited[1] += 18.5
    assert departure.seconds(known, 120.0) == 1.5
    known[1].exited = True
    assert departure.seconds(known, 120.0) == 20.0


def test_time_for_which_a_process_waits_for_a_core() -> None:
    core = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    both = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    try:
        wait_for(lambda: all(departure._starved_seconds(each.pid) > 0.1 for each in both), 30)
    finally:
        for each in both:
            each.kill()
            each.wait()
    assert departure._starved_seconds(both[0].pid) == 0.0


def test_guard_needs_no_package() -> None:
    code = f"import runpy, sys; runpy.run_path({worker.__file__!r}, run_name='x'); print(*sys.modules)"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT)
    assert not {"hvdlite", "numpy", "mpi4py"} & set(seen.stdout.split())


class Screen(Sink):
    """A sink that keeps what it got."""

    def __init__(self, is_terminal: bool = False) -> None:
        self.got = b""
        self._waiting = bytearray()
        self.is_terminal = is_terminal
        self.is_broken = False
        self.problem = ""

    def write(self, data: bytes) -> None:
        self.got += data


def patient_tick(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr("hvdlite.launch.job.output.time.monotonic", lambda: now + 1)
        output.tick()


def test_an_endless_line_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdlite.launch.job.output._LONGEST_KEPT", 10_000)
    out = Screen()
    output = Output(out, Screen(), tagged=True)
    for _ in range(30):
        output.feed(0, "stdout", b"x" * 1000)
    assert all(len(source.line) < 12_000 for source in output._sources.values())
    output.feed(0, "stdout", b"\n")
    assert out.got == b"[0] " + b"x" * 30_000 + b"\n"


@pytest.mark.parametrize("order", ["first", "last"])
def test_a_rank_ends_before_the_others_start_mpi(start: Start, tmp_path: Path, order: str) -> None:
    """MPI starts on all ranks together, so the others would wait for ever."""
    ended = start("-np", "3", "python", str(PROGRAMS / "ends_before_init.py"), order, str(tmp_path)).end()
    assert ended.code == 1
    last = ended.err[ended.err.rindex("hvdliterun: ") :]
    assert re.match(
        r"hvdliterun: rank 0 on host \S+ failed \(exit code 1\):\n"
        r"rank 0 has left the job without hvdlite\.init\(\): .* rank(s 1-2| 1| 2) cannot start MPI without it\.",
        last,
    ), ended.err


def test_directories_of_others_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for number, make in enumerate((lambda path: path.mkdir(0o755), lambda path: path.symlink_to(tmp_path))):
        path = tmp_path / f"hvdlite.{number}"
        monkeypatch.setenv("OMPI_MCA_btl_sm_backing_directory", str(path))
        shared_memory.create_directory()
        assert path.stat().st_mode & 0o777 == 0o700
        with monkeypatch.context() as other:
            other.setattr("os.getpid", lambda: 1)
            shared_memory.create_directory()  # the host's next rank
        shared_memory.leave_directory()
        assert [mark.name for mark in path.iterdir()] == ["guard.1"]
        with monkeypatch.context() as other:
            other.setattr("os.getpid", lambda: 1)
            shared_memory.leave_directory()
        assert not path.exists()
        make(path)
        with pytest.raises(PermissionError, match="made by another user"):
            shared_memory.create_directory()


def test_a_directory_that_a_rank_takes_as_it_ends_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, made = tmp_path / "hvdlite.0", []

    def and_another_rank_ends(directory: str) -> None:
        make_private(directory)
        made.append(directory)
        if len(made) < 3:
            path.rmdir()

    make_private = shared_memory.make_private
    monkeypatch.setenv("OMPI_MCA_btl_sm_backing_directory", str(path))
    monkeypatch.setattr(shared_memory, "make_private", and_another_rank_ends)
    shared_memory.create_directory()
    assert len(made) == 3 and len(list(path.iterdir())) == 1


def test_a_guard_removes_what_earlier_starts_of_its_job_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their host was cut off. What belongs to other jobs, or to other users, stays."""
    monkeypatch.setattr(shared_memory, "_MEMORY", str(tmp_path))
    starts = [shared_memory.new_directory("openmpi")]
    for _ in range(10):
        starts.append(shared_memory.new_directory("openmpi", starts[-1]))
    assert len(set(starts)) == 11 and len({name.rpartition(".")[0] for name in starts}) == 1
    others = [shared_memory.new_directory("openmpi"), str(tmp_path / "hvdlite.1"), str(tmp_path / "other")]
    for path in (*starts[:3], *others):
        Path(path).mkdir()
        Path(path, "segment").touch()
    Path(starts[4]).symlink_to(others[0])
    monkeypatch.setenv("OMPI_MCA_btl_sm_backing_directory", starts[10])
    with monkeypatch.context() as other:
        other.setattr("os.geteuid", lambda: os.getuid() + 1)
        shared_memory._remove_earlier(starts[10])
    assert all(Path(path).exists() for path in starts[:3])
    shared_memory.create_directory()
    assert sorted(map(str, tmp_path.iterdir())) == sorted([*others, starts[4], starts[10]])
    assert all(Path(path, "segment").exists() for path in others)


def test_lines_wait_for_their_end() -> None:
    out = Screen()
    output = Output(out, Screen(), tagged=True)
    output.feed(0, "stdout", b"half ")
    output.feed(1, "stdout", b"whole\nmore\n\nrest")
    output.feed(0, "stdout", b"line\n")
    output.close()
    assert out.got == b"[1] whole\n[1] more\n[1] \n[0] half line\n[1] rest\n"


def test_progress_bar_redraws(monkeypatch: pytest.MonkeyPatch) -> None:
    err = Screen()
    output = Output(Screen(), err, tagged=True)
    output.feed(0, "stderr", b"\r10%")
    assert err.got == b""
    patient_tick(output, monkeypatch)
    output.feed(0, "stderr", b"\r20%")
    output.feed(0, "stderr", b"\r30%\n")
    assert err.got == b"\r[0] 10%\r[0] 20%\r[0] 30%\n"


def test_progress_bar_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(is_terminal=True)
    output = Output(screen, screen, tagged=True)
    output.feed(0, "stderr", b"\r10%")
    patient_tick(output, monkeypatch)
    output.feed(1, "stdout", b"hello\n")
    output.feed(0, "stderr", b"\r20%")
    output.close()
    assert screen.got == b"\r[0] 10%" + b"\r\x1b[K" + b"[1] hello\n" + b"[0] 10%" + b"\r[0] 20%" + b"\n"


def test_unfinished_line_gives_way_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Screen()
    output = Output(out, Screen(), tagged=True)
    output.feed(0, "stdout", b"name? ")
    patient_tick(output, monkeypatch)
    output.feed(1, "stdout", b"hello\n")
    output.feed(0, "stdout", b"thanks\n")
    assert out.got == b"[0] name? \n[1] hello\n[0] thanks\n"
