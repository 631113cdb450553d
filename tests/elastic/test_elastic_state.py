"""``--state DIR``: an elastic job whose hvdliterun is killed goes on from a folder when the same command is started again."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hvdlite.elastic.store import Commit, Store
from hvdlite.errors import LaunchError
from hvdlite.launch import cli
from hvdlite.launch.elastic import state_folder
from hvdlite.launch.elastic.state_folder import StateFolder
from hvdlite.launcher_link.generation import CommitId
from tests.support.elastic_faults import undisturbed
from tests.support.jobs import PROGRAMS, Start, wait_for

COUNTER = str(PROGRAMS / "elastic_counter.py")
WORDS = ["python", "train.py"]


class Running:
    """A job with a folder, as hvdliterun has it: `directory` is the memory of the host."""

    def __init__(self, tmp_path: Path, name: str = "1", every: int = 1) -> None:
        self.said: list[str] = []
        self.directory = str(tmp_path / f"memory.{name}")
        self.path = tmp_path / "state"
        self.folder = StateFolder(str(self.path), WORDS, every, self.said.append)
        self.store = Store(self.directory, self.folder.key)
        self.found = self.folder.restore(self.directory)
        self.folder.start(self.directory)

    def commit(self, number: int, **saved: object) -> None:
        self.store.write(Commit(CommitId(1, number), 2, saved))
        self.folder.committed()

    def kept(self) -> list[str]:
        return sorted(name for name in os.listdir(self.path) if name.startswith("commit."))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        def look() -> bool:
            self.folder.look()
            return condition()

        wait_for(look, 20.0)


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_folder, "_PATIENCE_SECONDS", 0.0)


def test_the_same_command_goes_on_from_the_newest_commit(tmp_path: Path) -> None:
    first = Running(tmp_path, every=2)
    first.commit(1, x=np.full(3, 1.0))
    first.commit(2, x=np.full(3, 2.0))
    first.wait_for(lambda: first.kept() == ["commit.0.1.2"])
    for number, name in enumerate(first.kept()):  # clocks have jumped
        os.utime(first.path / name, (4e9 - number, 4e9 - number))
    first.commit(3, x=np.full(3, 3.0))
    first.folder.finish(is_over=False)  # the newest is kept at the end, due or not
    second = Running(tmp_path, "2")
    assert second.found == {0: CommitId(1, 3)}
    newest = second.store.newest()
    assert newest is not None
    np.testing.assert_array_equal(newest.saved["x"], np.full(3, 3.0))
    assert "It goes on from commit number 3." in second.said[0]
    second.folder.finish(is_over=True)
    assert os.listdir(second.path) == ["lock"], "the next start begins anew"


def test_a_commit_that_is_copied_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy waits until five newer commits have come, and is that of one commit."""
    go, sendfile = tmp_path / "go", os.sendfile

    def slowly(*arguments: int) -> int:
        wait_for(go.exists, 20.0)
        return sendfile(*arguments)

    monkeypatch.setattr(os, "sendfile", slowly)
    job = Running(tmp_path)
    job.commit(1, x=np.full(1000, 1.0))
    wait_for(lambda: os.path.exists(f"{job.directory}/held"), 20.0)
    for number in range(2, 7):
        job.commit(number, x=np.full(1000, number))
    go.touch()
    job.wait_for(lambda: job.kept() == ["commit.0.1.1", "commit.0.1.6"])
    kept = Store(str(job.path), job.folder.key)
    newest = kept.newest()
    assert newest is not None
    assert (newest.id.number, set(newest.saved["x"])) == (6, {6.0})
    os.unlink(job.path / "commit.0.1.6")
    before = kept.newest()
    assert before is not None
    assert (before.id.number, set(before.saved["x"])) == (1, {1.0})
    job.folder.finish(is_over=True)


def test_a_full_disk_is_said_once_and_the_commit_before_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, sendfile = tmp_path / "full", os.sendfile

    def to_disk(*arguments: int) -> int:
        if full.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return sendfile(*arguments)

    monkeypatch.setattr(os, "sendfile", to_disk)
    job = Running(tmp_path)
    job.commit(1, x=1)
    job.wait_for(lambda: job.kept() == ["commit.0.1.1"])
    full.touch()
    job.commit(2, x=2)
    job.wait_for(lambda: bool(job.said))
    job.commit(3, x=3)
    job.wait_for(lambda: not job.folder._busy and not job.folder._due)
    assert job.said == [
        f"hvdliterun: --state {job.path}: a commit cannot be kept: No space left on device. The training goes on.\n"
    ]
    assert sorted(os.listdir(job.path)) == ["commit.0.1.1", "job.json", "lock"]
    full.unlink()
    job.commit(4, x=4)
    job.wait_for(lambda: job.kept() == ["commit.0.1.1", "commit.0.1.4"])
    job.folder.finish(is_over=True)


def test_a_writer_that_is_killed_is_told(tmp_path: Path) -> None:
    job = Running(tmp_path)
    os.kill(job.folder._writer, signal.SIGKILL)
    job.wait_for(lambda: bool(job.said))
    job.commit(1, x=1)
    assert ["the process that writes was killed" in said for said in job.said] == [True]
    job.folder.finish(is_over=False)


def test_damaged_commits_are_left_out(tmp_path: Path) -> None:
    job = Running(tmp_path)
    for number in (1, 2):
        job.commit(number, x=number)
        job.wait_for(lambda: f"commit.0.1.{number}" in job.kept())  # noqa: B023
    job.folder.finish(is_over=False)
    newest = job.path / "commit.0.1.2"
    newest.write_bytes(newest.read_bytes()[:-1])
    second = Running(tmp_path, "2")
    second.folder.finish(is_over=False)
    assert second.found == {0: CommitId(1, 1)}
    assert "the file commit.0.1.2 is damaged, and is left out" in second.said[0]
    (job.path / "commit.0.1.1").write_bytes(b"")
    with pytest.raises(LaunchError, match="no commit of call 0 of elastic.run is whole"):
        Running(tmp_path, "3")


@pytest.mark.usefixtures("no_patience")
def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    def why(command: list[str] = WORDS, path: Path = tmp_path / "state") -> str:
        with pytest.raises(LaunchError) as caught:
            StateFolder(str(path), command, 1, print)
        return str(caught.value)

    job = Running(tmp_path)
    job.commit(1, x=1)
    assert "another job uses the folder" in why()
    job.folder.finish(is_over=False)
    other = why(["python", "other.py"])
    assert "it has the state of another job: python train.py (in " in other
    assert "and this one is python other.py (in " in other
    (job.path / "job.json").write_text("[]")
    assert "job.json is damaged" in why()
    (job.path / "job.json").unlink()
    assert "it has commits, and job.json is gone" in why()
    (job.path / "job.json").write_text(json.dumps({"key": "00"}))
    job.path.chmod(0o777)
    assert "others may write to it" in why()
    (tmp_path / "file").touch()
    assert "it is no folder" in why(path=tmp_path / "file")
    assert "the folder cannot be used: Not a directory" in why(path=tmp_path / "file/in")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-np 2 --state {}", "--state is for elastic jobs"),
        ("--min-np 2 --state-every 3", "--state-every N is for --state DIR"),
        ("--min-np 2 -H node1:2 --state {}", "--state: a rank must run on the host of hvdliterun"),
    ],
)
def test_options_that_cannot_be(words: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words.format(tmp_path / "state").split(), COUNTER]) == cli.USAGE_ERROR
    assert said in capfd.readouterr().err


@pytest.mark.slow
def test_hvdliterun_is_killed(start: Start, tmp_path: Path) -> None:
    """No step that was said to be committed is lost or counted twice, though only each third commit is kept meanwhile."""
    folder = tmp_path / "state"
    env = {"COUNTER_FOLDER": str(tmp_path), "COUNTER_STEPS": "150", "COUNTER_TELL": "1"}
    words = ["-np", "2", "--min-np", "2", "--state", str(folder), "--state-every", "3", COUNTER]
    seen = 0
    for at in (20, 60):
        job = start(*words, env=env)
        assert job.process.stdout is not None
        while not (found := re.search(r"step (\d+) of", job.process.stdout.readline())) or int(found[1]) < at:
            assert job.process.poll() is None
        assert int(found[1]) >= seen
        job.process.kill()
        job.process.wait()
        seen = max(map(int, re.findall(r"step (\d+) of", job.process.stdout.read())), default=at)
    ended = start(*words, env=env).end()
    assert ended.code == 0, ended.err
    number = int(
        re.findall(r"an earlier start of this job has left its state\. It goes on from commit number (\d+)", ended.err)[
            0
        ]
    )
    first = int(re.findall(r"step (\d+) of", ended.out)[0])
    assert first == number + 1 >= seen, "a step is printed before it is committed"
    assert "150 steps, counted {np.int64(1)} times and 150 in all" in ended.out
    assert f"weights {undisturbed(150, changes=[(0, 2)])}" in ended.out
    assert os.listdir(folder) == ["lock"]
