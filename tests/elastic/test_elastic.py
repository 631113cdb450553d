"""What an elastic training commits, and how it goes on: states, commits on each host, and real jobs in which ranks fail."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hvdlite as hvd
from hvdlite import elastic
from hvdlite.elastic.keeper import HostKeeper
from hvdlite.elastic.store import Commit, Store
from hvdlite.errors import ArgumentError
from hvdlite.launcher_link.generation import CommitId, Generation
from hvdlite.testing import on_ranks

KEY = "5e" * 32


def commit(number: int, generation: int = 1, size: int = 4, **saved: Any) -> Commit:
    return Commit(CommitId(generation, number), size, saved)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "commits")


# ---- commits of one host ----


def test_a_commit_comes_back(folder: str) -> None:
    state = {
        "weights": np.arange(5.0),
        "empty": np.zeros((0, 3)),
        "epoch": 3,
        "names": ["a"],
        "turned": np.eye(3)[:, ::2],
    }
    Store(folder, KEY).write(commit(7, **state))
    found = Store(folder, KEY).newest()
    assert found is not None
    assert (found.id, found.size) == (CommitId(1, 7), 4)
    for name, value in state.items():
        np.testing.assert_array_equal(found.saved[name], value)
    found.saved["weights"][0] = 9.0  # it can be written to


def test_the_last_two_are_kept_and_the_newest_is_found(folder: str) -> None:
    store = Store(folder, KEY)
    assert store.newest() is None
    for number in (9, 10, 11):
        store.write(commit(number, x=np.full(number, number)))
    assert sorted(os.listdir(folder)) == ["commit.0.1.10", "commit.0.1.11"]
    store.write(commit(2, generation=2, x=1))
    found = store.newest()
    assert found is not None
    assert found.id == (2, 2), "a later generation has gone on from an older commit"


def test_calls_have_commits_of_their_own(folder: str) -> None:
    Store(folder, KEY, 0).write(commit(1, x="first"))
    Store(folder, KEY, 1).write(commit(2, x="second"))
    first = Store(folder, KEY, 0).newest()
    assert first is not None
    assert first.saved == {"x": "first"}


def test_only_the_owner_may_read(folder: str) -> None:
    Store(folder, KEY).write(commit(1, x=1))
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(f"{folder}/commit.0.1.1").st_mode) == 0o600
    os.chmod(folder, 0o755)
    with pytest.raises(elastic.CommitError, match="others may use it"):
        Store(folder, KEY)


def test_another_job_reads_nothing(folder: str) -> None:
    Store(folder, KEY).write(commit(1, x=1))
    assert Store(folder, "00" * 32).newest() is None
    assert Store(folder, KEY, 1).newest() is None
    os.rename(f"{folder}/commit.0.1.1", f"{folder}/commit.1.1.1")
    assert Store(folder, KEY, 1).newest() is None, "the name does not say whose it is"


class _Unpicklable:
    def __reduce__(self) -> str:
        raise TypeError("not this one")


def test_what_cannot_be_pickled_is_named(folder: str) -> None:
    store = Store(folder, KEY)
    store.write(commit(1, x=1))
    with pytest.raises(
        elastic.CommitError, match="attribute 'loader' of the state, of type _Unpicklable, cannot be pickled"
    ):
        store.write(commit(2, x=1, loader=_Unpicklable()))
    found = store.newest()
    assert found is not None
    assert found.id.number == 1


def test_a_lack_of_room_is_said_and_the_old_commit_stays(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(folder, KEY)
    store.write(commit(1, x=1))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(elastic.CommitError, match=r"takes 7\.6 MiB.*--commit-directory"):
        store.write(commit(2, x=np.zeros(10**6)))
    assert os.listdir(folder) == ["commit.0.1.1"]


_SAVED = {"weights": np.arange(300.0), "text": "abc" * 20, "more": np.arange(50)}


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_broken_commit_leaves_the_one_before_it(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Cut off or changed anywhere, a file is either whole or is not used; nothing in it is unpickled."""
    folder = tmp_path_factory.mktemp("commits", numbered=True)
    folder.chmod(0o700)
    store = Store(str(folder), KEY)
    store.write(commit(1, **_SAVED))
    store.write(commit(2, **_SAVED))
    path = folder / "commit.0.1.2"
    whole = path.read_bytes()
    if data.draw(st.booleans(), "cut"):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    else:
        position = data.draw(st.integers(0, len(whole) - 1))
        path.write_bytes(
            whole[:position] + bytes([whole[position] ^ data.draw(st.integers(1, 255))]) + whole[position + 1 :]
        )
    found = store.newest()
    assert found is not None
    assert found.id.number == 1
    np.testing.assert_array_equal(found.saved["weights"], _SAVED["weights"])


@pytest.mark.parametrize("call", ["rename", "ftruncate", "posix_fallocate", "writev", "close"])
def test_a_crash_while_it_is_written_leaves_the_one_before_it(folder: str, call: str) -> None:
    """The process ends at any step of the write; the next one finds the commit before, and removes the rest."""
    store = Store(folder, KEY)
    for number in (1, 2):
        store.write(commit(number, x=number))
    child = os.fork()
    if child == 0:
        setattr(os, call, lambda *_: os._exit(0))
        store.write(commit(3, x=3))
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    store = Store(folder, KEY)
    found = store.newest()
    assert found is not None
    assert found.saved == {"x": 2}
    store.write(commit(3, x=3))
    assert sorted(os.listdir(folder)) == ["commit.0.1.2", "commit.0.1.3"]


# ---- states, on ranks ----


def test_a_state_saves_and_restores_copies() -> None:
    def each() -> None:
        state = elastic.ObjectState(losses=[1.0], epoch=hvd.rank())
        state.sync()
        assert state.epoch == 0
        state.losses.append(2.0)
        state.commit()
        state.losses.append(3.0)
        state.restore()
        state.losses.append(4.0)
        state.restore()
        assert state.losses == [1.0, 2.0]

    on_ranks(3, each)


def test_hosts_that_change_interrupt_all_ranks_at_the_same_call() -> None:
    def each() -> list[object]:
        state = elastic.ObjectState(x=0)
        state.check_host_updates()
        if hvd.rank() == 1:
            state.on_hosts_updated(1.0, elastic.HostUpdateResult.removed)
            state.on_hosts_updated(1.0, elastic.HostUpdateResult.added)  # not later than the one before
        with pytest.raises(elastic.HostsUpdatedInterrupt) as caught:
            state.commit()
        state.on_reset()
        state.check_host_updates()
        return [caught.value.skip_sync, caught.value.is_committed]

    assert on_ranks(3, each) == [[True, True]] * 3


def test_attributes_that_a_state_has_itself() -> None:
    with pytest.raises(ArgumentError, match=r"ObjectState\(commit=…\): a state has such an attribute itself"):
        elastic.ObjectState(commit=3)
    with pytest.raises(elastic.CommitError, match="'lock' of the state, of type lock, cannot be copied"):
        elastic.ObjectState(lock=threading.Lock()).save()


def _generation(folder: str, number: int, *committed: CommitId) -> Generation:
    return Generation(number, KEY, folder, committed)


def test_all_ranks_go_on_from_the_newest_commit_that_a_host_has(tmp_path: Path) -> None:
    """Two hosts: one was killed before it had written the last commit, which is the one of rank 0."""

    def first() -> None:
        state = elastic.ObjectState(w=np.zeros(3), step=0)
        keeper = HostKeeper(_generation(str(tmp_path / str(hvd.cross_rank())), 1), 0, None)
        assert keeper.load(state) is None
        state._keeper = keeper
        for state.step in (1, 2):
            state.w = state.w + state.step
            state.commit()

    def second() -> tuple[int | None, int, float]:
        state = elastic.ObjectState(w=np.zeros(3), step=0)
        keeper = HostKeeper(_generation(str(tmp_path / str(hvd.cross_rank())), 2, CommitId(1, 2)), 0, None)
        size = keeper.load(state)
        state.sync()
        return size, state.step, float(state.w.sum())

    on_ranks(4, first, hosts=[0, 0, 1, 1])
    os.unlink(tmp_path / "0" / "commit.0.1.2")
    assert on_ranks(3, second, hosts=[0, 0, 1]) == [(4, 2, 9.0)] * 3
    with pytest.raises(
        elastic.CommitError, match="has committed number 2, and none of its present hosts has it: the newest"
    ):
        on_ranks(2, second, hosts=[0, 0])


def test_a_state_that_one_host_cannot_keep_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    def each() -> str:
        state = elastic.ObjectState(x=_Fragile() if hvd.rank() == 2 else 1)
        state._keeper = HostKeeper(_generation(str(tmp_path / str(hvd.cross_rank())), 1), 0, None)
        with pytest.raises(elastic.CommitError) as caught:
            state.commit()
        state.x = 2
        state.commit()
        return str(caught.value)

    texts = on_ranks(4, each, hosts=[0, 0, 1, 1])
    assert len(set(texts)) == 1
    assert "rank 2: the attribute 'x' of the state, of type _Fragile, cannot be pickled" in texts[0]


class _Fragile:
    def __deepcopy__(self, memo: dict[int, Any]) -> _Fragile:
        return self

    def __reduce__(self) -> str:
        raise TypeError("not this one")
