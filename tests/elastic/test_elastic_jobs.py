"""Elastic jobs under hvdliterun: ranks fail, hosts come and go, and jobs that cannot go on say why."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hvdlite.launch import cli
from hvdlite.launch.elastic.janitor import Janitor
from hvdlite.launch.job.hosts import Host
from tests.support.elastic_faults import IN_A_JOB, Training, choose
from tests.support.elastic_faults import LIMIT as FAULTS_LIMIT
from tests.support.jobs import PROGRAMS, ROOT, Start, wait_for
from tests.support.pages import program_of

SEED = 7
COUNTER = str(PROGRAMS / "elastic_counter.py")


def committed_by(pid: int) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith("hvdlite.") and f".{pid}." in name]


@pytest.mark.weekly
@pytest.mark.timeout(2 * FAULTS_LIMIT + 20)
def test_ten_faults(tmp_path: Path) -> None:
    """Two jobs at once on this host, with five faults each; `scripts/faults --elastic` runs many."""
    trainings = []
    for number, faults in enumerate(choose(SEED, 2 * IN_A_JOB)):
        (folder := tmp_path / str(number)).mkdir()
        trainings.append(Training(faults, folder, every=1 + number))
    assert [training.end() for training in trainings] == [[], []]
    assert all(training.restarts for training in trainings)


@pytest.mark.timeout(180)
def test_hosts_come_and_go(start: Start, tmp_path: Path) -> None:
    """From 2 ranks to 4 and back; what the script prints in between that is no list of hosts changes nothing.

    The program never commits: its steps are committed when hosts change.
    """
    hosts, end = tmp_path / "hosts", tmp_path / "end"
    hosts.write_text("localhost:2\n")
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o700)
    env = {"COUNTER_FOLDER": str(tmp_path), "COUNTER_UNTIL": str(end), "COUNTER_TELL": "1", "COUNTER_EVERY": "1000000"}
    job = start("--min-np", "2", "--host-discovery-script", str(script), COUNTER, env=env)
    out, err = job.process.stdout, job.process.stderr
    assert out is not None
    assert err is not None

    def printed(words: str) -> None:
        for line in out:
            if words in line:
                return
        raise AssertionError(f"ended before it printed {words!r}: {err.read()}")

    printed("of 2 ranks")
    (tmp_path / "new").write_text("no host\n")
    os.replace(tmp_path / "new", hosts)
    assert "--host-discovery-script: it printed, in line 1, 'no host': 'no host' is not a host name" in err.readline()
    hosts.unlink()
    assert "--host-discovery-script: it ended with exit code 1, saying:" in err.readline()
    assert "No such file" in err.readline()
    (tmp_path / "new").write_text("localhost:4\n")
    os.replace(tmp_path / "new", hosts)
    printed("of 4 ranks")
    (tmp_path / "new").write_text("localhost:2\n")
    os.replace(tmp_path / "new", hosts)
    printed("of 2 ranks")
    end.touch()
    ended = job.end()
    assert ended.code == 0, ended.err
    found = re.search(
        r"(\d+) steps, counted \{(.*)\} times and (\d+) in all, sizes (.*), resets (.*), weights", ended.out
    )
    assert found is not None, ended.out
    assert (found[1], found[2], found[4]) == (found[3], repr(np.int64(1)), "[2, 4, 2]")
    resets = re.findall(r"\((\d+), (\d+)\)", found[5])
    assert [int(size) for _, size in resets] == [4, 2]
    assert ended.err.count("the hosts have changed") == 2
    assert committed_by(job.process.pid) == []


@pytest.mark.slow
def test_a_failure_that_always_comes_again_ends_the_job(start: Start, tmp_path: Path) -> None:
    job = start("-np", "2", "--min-np", "2", "--reset-limit", "1", str(PROGRAMS / "elastic_fails.py"))
    ended = job.end()
    assert ended.code == 1
    assert "hvdliterun: start again (number 1) with 2 ranks on localhost:2, from the beginning" in ended.err
    reason = "hvdliterun: the elastic job ends: it has started again 1 times (--reset-limit). The last failure:\n"
    assert ended.err.count("ValueError: as always") == 2, "each failure is printed once"
    assert re.search(re.escape(reason) + r"hvdliterun: rank 1 on .*\n.*\n(?s:.*)ValueError: as always\n$", ended.err), (
        ended.err
    )
    assert committed_by(job.process.pid) == []


@pytest.mark.costly
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_nothing_stays_whatever_ends_hvdliterun(start: Start, tmp_path: Path, number: int, code: int) -> None:
    env = {"COUNTER_FOLDER": str(tmp_path), "COUNTER_UNTIL": str(tmp_path / "never"), "COUNTER_TELL": "1"}
    job = start("-np", "2", "--max-np", "2", COUNTER, env=env)
    assert job.process.stdout is not None
    assert "step 1" in job.process.stdout.readline()
    assert [name for name in committed_by(job.process.pid) if name.startswith("hvdlite.commits.")]
    job.process.send_signal(number)
    assert job.end().code == code
    wait_for(lambda: committed_by(job.process.pid) == [], 10.0)
    job.wait_until_gone(10.0)


def test_hosts_that_the_end_of_the_job_does_not_reach_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\ncase "$*" in *" away "*) exit 255 ;; esac\necho "$*" >> {tmp_path}/called\n')
    ssh.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (committed := tmp_path / "hvdlite.commits.1").mkdir()
    janitor = Janitor(str(committed), ["-p", "2222"])
    janitor.add([Host("there", 2), Host("away", 2)])
    assert janitor.finish() == ["away"]
    assert f"-p 2222 there rm -rf {committed}\n" in (tmp_path / "called").read_text()
    assert not committed.exists()


@pytest.mark.slow
def test_each_training_of_a_program_has_commits_of_its_own(start: Start, tmp_path: Path) -> None:
    ended = start("--min-np", "2", str(PROGRAMS / "elastic_phases.py"), str(tmp_path / "mark")).end()
    assert ended.code == 0, ended.err
    found = re.findall(r"(first|second) from (\d)", ended.out)
    assert found[:2] == [("first", "0"), ("first", "5")], "the first one had come to its end"
    assert found[2] in [("second", "3"), ("second", "4")]


@pytest.mark.slow
def test_the_page_is_a_program(start: Start, tmp_path: Path) -> None:
    """Alone, and on two ranks of which one kills itself in the middle: the same weights."""
    text, place = program_of(ROOT / "docs/elastic.md"), "        state.commit()"
    assert place in text
    fault = "        if state.epoch == 50 and hvd.rank() == 1 and not os.path.exists('mark'):\n"
    fault += "            open('mark', 'w').close()\n            os.kill(os.getpid(), 9)\n"
    (tmp_path / "train.py").write_text(
        "import os\n" + text.replace(place, fault + place).replace("0.02 * hvd.size()", "0.02")
    )
    alone = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    ended = start("-np", "2", "--min-np", "2", "train.py", cwd=tmp_path).end()
    assert ended.code == alone.returncode == 0, ended.err + alone.stderr
    assert (tmp_path / "mark").exists()
    weights = [
        float(re.search(r"epoch 100, . ranks, weights (.*)$", out, re.M)[1]) for out in (ended.out, alone.stdout)
    ]  # type: ignore[index]
    np.testing.assert_allclose(*weights, rtol=1e-5)


@pytest.mark.slow
def test_a_training_that_hvdliterun_does_not_restart(start: Start, tmp_path: Path) -> None:
    ended = start("-np", "2", COUNTER, env={"COUNTER_FOLDER": str(tmp_path), "COUNTER_STEPS": "3"}).end()
    assert ended.code == 0, ended.err
    assert "3 steps, counted" in ended.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--reset-limit 3 -np 2",
            "--reset-limit is for elastic jobs: give --min-np, --max-np or --host-discovery-script too.",
        ),
        ("-np 2 --min-np 4", "-np 2, --min-np 4: expected min <= np <= max."),
        ("-np 4 --max-np 2", "-np 4, --min-np 4, --max-np 2: expected min <= np <= max."),
        ("--max-np 2", "how many ranks? Give -np N, or --min-np N."),
        ("--min-np 4 -H localhost:2", "-np 4: localhost:2 has only 2 slots"),
        ("--min-np 2 --servers 1", "--servers: a training with parameter servers cannot be elastic."),
        ("--min-np 2 --slots-per-host 4", "--slots-per-host is for --host-discovery-script"),
        ("--min-np 2 --blacklist-cooldown-range 9 2", "expected the shorter time first"),
        ("--min-np 2 --host-discovery-script nowhere.sh", "there is no such program, or it is not executable"),
        ("--min-np 2 --host-discovery-script 'a", "No closing quotation"),
        ("--min-np 2 --host-discovery-script true -H localhost:2", "both name the hosts, give one"),
        ("--min-np 2 --commit-directory /nowhere", "--commit-directory /nowhere: there is no such folder."),
    ],
)
def test_options_that_cannot_be(words: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words.replace("'a", "'a").split(), COUNTER]) == cli.USAGE_ERROR
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        (
            "false",
            cli.USAGE_ERROR,
            ["hvdliterun: --host-discovery-script: it ended with exit code 1, and said nothing."],
        ),
        (
            "echo localhost:2",
            1,
            [
                "hvdliterun: waiting for hosts: there are 2 slots (localhost:2) and 4 are needed.",
                "hvdliterun: the elastic job ends: there are 2 slots (localhost:2) and 4 are needed, for 1 s "
                "(--elastic-timeout).",
            ],
        ),
    ],
)
def test_hosts_that_are_not_there_end_the_job(start: Start, script: str, code: int, said: list[str]) -> None:
    ended = start("--min-np", "4", "--elastic-timeout", "0.7", "--host-discovery-script", script, COUNTER).end()
    assert ended.code == code
    lines = re.sub(r"for \d+ s", "for 1 s", ended.err).splitlines()
    assert lines[0] == said[0]
    assert lines[-1] == said[-1]
