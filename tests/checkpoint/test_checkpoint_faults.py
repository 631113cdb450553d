"""Wherever a save fails or the process dies, the last complete checkpoint is there, and is what is loaded.

Every call that changes the disk goes through `hvdlite.checkpoint.disk`, whose `os` these tests replace.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import stat
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hvdlite as hvd
from hvdlite.checkpoint import disk, loading, saving
from hvdlite.config import Config
from hvdlite.errors import ArgumentError, CheckpointError, HvdliteError
from hvdlite.testing import on_ranks
from tests.support.counted_state import load, register, save


@pytest.fixture(autouse=True)
def _counters(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (saving, loading):
        monkeypatch.setattr(module, "stateful", module.stateful)  # it is as before after the test
    register()


def run(size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    return on_ranks(size, fn, *args, config=Config(deadlock_time_seconds=0.3, advice=False))


class FaultyDisk:
    """The module `os` for `hvdlite.checkpoint.disk`. Its call number `fail_at` fails; or the process dies there.

    A process that dies makes no further call. What it has written and not synchronized may then be lost: some of its bytes are.
    """

    CALLS = frozenset({"open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir"})

    def __init__(self, fail_at: int, dies: bool, seed: int = 0) -> None:
        self.calls, self.fail_at, self.dies = 0, fail_at, dies
        self.dead = False
        self._chance = random.Random(seed)
        self._lock = threading.Lock()  # ranks are threads
        self._open: dict[int, str] = {}
        self._unsafe: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)

        def call(*args: Any, **more: Any) -> Any:
            with self._lock:
                return self._call(name, real, *args, **more)

        return call if name in self.CALLS else real

    def _call(self, name: str, real: Callable[..., Any], *args: Any, **more: Any) -> Any:
        reading = name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR)
        self.calls += not reading
        if self.dead or (self.calls == self.fail_at and not reading):
            if self.dies and not self.dead:
                self.dead = True
                self._lose()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        result = real(*args, **more)
        if name == "open":
            self._open[result] = str(args[0])
        elif name == "write":
            self._unsafe.add(self._open[args[0]])
        elif name == "fsync":
            self._unsafe.discard(self._open[args[0]])
        elif name == "rename":
            self._unsafe = {path.replace(str(args[0]), str(args[1])) for path in self._unsafe}
        return result

    def _lose(self) -> None:
        for path in self._unsafe:
            with contextlib.suppress(OSError):
                os.truncate(path, self._chance.randrange(os.path.getsize(path) + 1))


def attempt(
    folder: Path, size: int, value: int, faulty: FaultyDisk, monkeypatch: pytest.MonkeyPatch, wait: bool = True
) -> bool:
    """Save on a disk that fails. Return whether it was saved; if not, all ranks have raised."""

    def work() -> str:
        try:
            save(folder, value, keep=2, wait=wait)
            hvd.checkpoint.wait()
        except CheckpointError as error:
            return str(error)
        return ""

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an old checkpoint that cannot be removed
        patch.setattr(disk, "os", faulty)
        outcomes = run(size, work)
    (text,) = set(outcomes)
    assert not text or "No space left on device" in text
    return not text


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def number_of_calls(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch, wait: bool) -> int:
    counting = FaultyDisk(0, dies=False)
    for value in (1, 2):
        run(size, save, tmp_path / "counted", value)
    assert attempt(tmp_path / "counted", size, 3, counting, monkeypatch, wait)
    return counting.calls


@pytest.mark.parametrize(
    ("size", "wait", "dies"),
    [(1, True, False), (1, True, True), (3, True, False), (3, True, True), (3, False, False)],
    ids=["one, disk is full", "one, process dies", "disk is full", "process dies", "disk is full behind the training"],
)
def test_a_failure_at_every_call(
    tmp_path: Path, size: int, wait: bool, dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = number_of_calls(tmp_path, size, monkeypatch, wait)
    assert calls > 20
    saved = 0
    for at in range(1, calls + 1):
        folder = tmp_path / str(at)
        for value in (1, 2):
            run(size, save, folder, value)
        done = attempt(folder, size, 3, FaultyDisk(at, dies, seed=at), monkeypatch, wait)
        found = run(1, load, folder)[0]
        # A process may die, or the disk fail, when the new checkpoint has its name already.
        assert found in ([(3, [])] if done else [(2, []), (3, [])]), at
        if not done and not dies:
            assert [name for name in names_in(folder) if name.startswith(".")] == [], at
        saved += done
        assert run(size, save, folder, 4)[0].name == f"checkpoint-0000000{found[0] + 1}"  # and it goes on
        assert run(2, load, folder) == [(4, [])] * 2
        assert not any(name.startswith(".") for name in names_in(folder))
    assert 0 < saved < calls  # only what removes old ones may fail


@settings(max_examples=25)
@given(data=st.data())
def test_what_is_damaged_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A file that is cut, changed, or gone: the checkpoint before is loaded, on all ranks, and rank 0 says why."""
    folder = tmp_path_factory.mktemp("checkpoints")
    sizes = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    for value in (1, 2, 3):
        run(sizes[0], save, folder, value)
    damaged = data.draw(st.integers(1, 2))
    for number in range(3, 3 - damaged, -1):
        files = sorted((folder / f"checkpoint-0000000{number}").iterdir())
        path = files[data.draw(st.integers(0, len(files) - 1))]
        content = path.read_bytes()
        how = data.draw(st.sampled_from(["cut", "changed", "gone", "longer"]))
        if how == "gone":
            path.unlink()
        elif how == "cut":
            path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        elif how == "longer":
            path.write_bytes(content + b"\n{}")
        else:
            place = data.draw(st.integers(0, len(content) - 1))
            other = bytes([content[place] ^ 1 << data.draw(st.integers(0, 7))])
            path.write_bytes(content[:place] + other + content[place + 1 :])
    found = run(sizes[1], load, folder)
    assert [each[0] for each in found] == [3 - damaged] * sizes[1]
    said = [text for _, texts in found for text in texts]
    assert "checkpoint-00000003: " in said[0] and f"checkpoint-0000000{3 - damaged} is loaded" in said[0]


def test_nothing_is_whole(tmp_path: Path) -> None:
    run(1, save, tmp_path, 1)
    (tmp_path / "checkpoint-00000001/weights.other-values.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* is whole:\ncheckpoint-00000001: weights.*No such file.*\n"
    ):
        run(2, load, tmp_path)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_ranks_check_parts_of_a_file(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum is the SHA-256 of those of the parts; whichever part is damaged, by whomever it is checked, it is found."""
    monkeypatch.setattr(disk, "CHUNK", 10000)
    for value in (1, 2):
        run(size, save, tmp_path, value)
    path = tmp_path / "checkpoint-00000002/weights.other-values.safetensors"
    content = path.read_bytes()
    parts = [hashlib.sha256(content[begin : begin + 10000]).digest() for begin in range(0, len(content), 10000)]
    assert len(parts) == 5
    record = json.loads((path.parent / "manifest.json").read_text())["checkpoint"]["files"][path.name]
    assert record == {"bytes": len(content), "sha256": hashlib.sha256(b"".join(parts)).hexdigest()}
    assert run(size, load, tmp_path) == [(2, [])] * size
    for place in range(5000, len(content), 10000):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        found = run(size, load, tmp_path)
        assert [number for number, _ in found] == [1] * size
        said = [text for _, texts in found for text in texts]
        assert "weights.other-values.safetensors has another checksum" in said[0]


def test_two_jobs_save_in_one_folder(tmp_path: Path) -> None:
    run(1, save, tmp_path, 1)
    with disk.locked(tmp_path / ".lock") as mine:
        assert mine
        with pytest.raises(CheckpointError, match="another job is saving a checkpoint in .* a folder of its own"):
            run(2, save, tmp_path, 2)
    assert run(2, load, tmp_path) == [(1, [])] * 2


@pytest.mark.parametrize("before", [None, 0o644])
def test_who_may_only_read_the_folder_cannot_hold_the_lock(tmp_path: Path, before: int | None) -> None:
    """Its file can be opened by those who may write it, and by nobody else: also a file that an earlier version has made."""
    lock = tmp_path / ".lock"
    if before is not None:
        lock.touch()
        lock.chmod(before)
    run(1, save, tmp_path, 1)
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600
    lock.chmod(0o664)  # a folder in which a group works
    run(1, save, tmp_path, 2)
    assert stat.S_IMODE(lock.stat().st_mode) == 0o660


@pytest.mark.parametrize("name", ["weights.other-values.safetensors", "manifest.json", ".lock"])
@pytest.mark.parametrize("kind", ["a FIFO", "a link"])
def test_something_else_in_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str, kind: str) -> None:
    run(1, save, tmp_path, 1)
    (file,) = tmp_path.rglob(name)
    file.rename(tmp_path / "moved")
    if kind == "a FIFO":
        os.mkfifo(file)
    else:
        file.symlink_to(tmp_path / "moved")
    said = f"{name} is a link" if kind == "a link" else f"{name} is no file"
    if name == ".lock":
        with pytest.raises(CheckpointError, match="it is no file|symbolic links"):
            run(1, save, tmp_path, 2)
        assert run(1, load, tmp_path) == [(1, [])]
    else:
        with pytest.raises(CheckpointError, match=said):
            run(1, load, tmp_path)


def test_a_rank_that_does_not_see_the_folder(tmp_path: Path) -> None:
    """Its part is sent to rank 0; and what it loads comes from the ranks that see the checkpoint."""

    def work() -> None:
        folder = tmp_path / ("here" if hvd.rank() != 1 else "elsewhere")
        with pytest.raises(
            ArgumentError, match="ranks? .*does not see the folder of rank 0, and wait=False needs that"
        ):
            save(folder, 1, wait=False)
        save(folder, 1)
        assert load(folder) == (1, [])

    run(3, work)
    assert not (tmp_path / "elsewhere").exists()
    assert sorted(path.name for path in (tmp_path / "here/checkpoint-00000001").iterdir()) == [
        "counter.part-00000.safetensors",
        "counter.part-00001.safetensors",
        "counter.part-00002.safetensors",
        "manifest.json",
        "weights.other-values.safetensors",
    ]


def test_a_disk_that_is_full_while_a_part_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        folder = tmp_path / ("here" if hvd.rank() != 1 else "elsewhere")
        with pytest.raises(CheckpointError, match="rank 0: OSError: .*No space left"):
            save(folder, 1)

    plain = disk.write_file

    def write_file(path: Path, chunks: Any) -> disk.FileRecord:
        if path.name == "counter.part-00001.safetensors":
            next(iter(chunks))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(path, chunks)

    monkeypatch.setattr(disk, "write_file", write_file)
    run(3, work)
    assert names_in(tmp_path / "here") == []


def test_a_rank_that_is_missing(tmp_path: Path) -> None:
    """The others do not hang, and what was begun is removed."""

    def work() -> None:
        if hvd.rank() == 1:
            raise KeyError("this rank")
        save(tmp_path, 1)

    with pytest.raises((KeyError, HvdliteError)):
        run(2, work)
    assert [name for name in names_in(tmp_path) if not name.startswith(".")] == []
