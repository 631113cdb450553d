"""The ranks of an elastic job that go on in their processes when others fail."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.config import Config
from hvdlite.errors import PeerLeftError
from hvdlite.launch.job.failures import Failure
from hvdlite.launch.job.ranks import Ranks
from hvdlite.launch.job.survival.survivors import Survivors
from hvdlite.launch.worker.rank_environment import HOROVOD_VARIABLE, renumber_horovod_variables
from hvdlite.launcher_link.generation import Generation
from hvdlite.launcher_link.session import Message, ProtocolError
from hvdlite.testing import on_ranks
from tests.support.elastic_faults import LIMIT, Training, choose
from tests.support.jobs import PROGRAMS, Start

SEED = 3
COUNTER = str(PROGRAMS / "elastic_counter.py")


class Wire:
    """A connection of a rank, or of its guard, that keeps what it is sent."""

    is_local = True

    def __init__(self) -> None:
        self.rank: int | None = None
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def belongs_to(self, rank: int) -> None:
        self.rank = rank

    def send(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        Message(kind, fields, payload).check()
        self.sent.append((kind, fields))

    @property
    def last(self) -> str:
        return self.sent[-1][0]


class Room:
    """A job of some ranks that are in the same call of ``elastic.run``."""

    def __init__(self, size: int, fewest: int = 1) -> None:
        self.ranks = Ranks(size)
        self.failed: list[Failure] = []
        self.why: list[str] = []
        self.granted: list[list[int]] = []
        self.survivors = Survivors(self.ranks, self.failed.append, self.why.append)  # type: ignore[arg-type]
        self.survivors.allows = lambda lost: "" if len(self.ranks.left) - len(lost) >= fewest else "too few are left"
        self.survivors.grant = self._grant
        self.guards, self.wires = [Wire() for _ in range(size)], [Wire() for _ in range(size)]
        self.now = 0.0
        for number, (guard, wire) in enumerate(zip(self.guards, self.wires, strict=True)):
            self.ranks.add(guard, {"rank": number, "host": "h", "pid": 1, "guard": 2})  # type: ignore[arg-type]
            self.say(number, "outlives", rank=number, call=0)
            assert wire.last == "ok"

    def _grant(self, losses: Any) -> Generation:
        self.granted.append(self.ranks.left)
        return Generation(1 + len(self.granted), "", "")

    def say(self, number: int, kind: str, **fields: Any) -> None:
        message = Message(kind, fields)
        message.check()
        self.survivors.hear(self.wires[number], message)  # type: ignore[arg-type]

    def fail(self, number: int, exits: bool = True) -> bool:
        self.ranks[number].exited = exits
        return self.survivors.go_on_without(Failure("it was killed", 137, 0.0, number), self.now)

    def look(self, later: float = 0.0) -> None:
        self.now += later
        self.survivors.look(self.now)


def test_a_generation_comes_when_all_that_are_left_have_asked() -> None:
    room = Room(3)
    assert room.fail(1)
    assert room.guards[1].last == "drop"
    assert [room.guards[0].last, room.guards[2].last] == ["stay", "stay"]
    assert [wire.last for wire in room.wires] == ["lost", "ok", "lost"]
    room.say(0, "again")
    room.look()
    assert room.granted == []
    room.say(2, "again")
    room.look()
    assert room.wires[2].sent[-1] == ("generation", {"number": 2, "ranks": [0, 2], "committed": []})
    assert room.ranks.present == 2
    room.say(0, "together")
    room.say(2, "together")
    room.look()
    room.look(100.0)
    assert (room.failed, room.why) == ([], [])


def test_it_does_not_come_before_the_failed_rank_has_ended() -> None:
    room = Room(2)
    room.fail(1, exits=False)  # it is stopped
    room.say(0, "again")
    room.look()
    assert room.granted == []
    room.ranks[1].exited = True
    room.look()
    assert room.granted == [[0]]


@pytest.mark.parametrize("at", ["before they ask", "before the generation", "after it"])
def test_another_failure_meanwhile(at: str) -> None:
    room = Room(4)
    room.fail(1)
    if at == "before they ask":
        assert room.fail(2)
    room.say(0, "again")
    if at == "before the generation":
        room.say(2, "again")
        assert room.fail(2)
    room.say(3, "again")
    room.look()
    if at == "after it":
        room.say(2, "again")
        room.look()
        assert room.granted == [[0, 2, 3]]
        room.say(0, "together")
        assert room.fail(2)
        for number in (0, 3):
            assert room.wires[number].last == "lost"
            room.say(number, "again")
        room.look()
    assert room.granted[-1] == [0, 3]
    room.say(0, "together")
    room.say(3, "together")
    room.look()
    room.look(100.0)
    assert room.failed == []


@pytest.mark.parametrize("stuck", ["in its function", "in the new group"])
def test_a_rank_that_is_stuck_makes_the_job_start_again(stuck: str) -> None:
    room = Room(3)
    room.fail(1)
    room.say(0, "again")
    if stuck == "in the new group":
        room.say(2, "again")
        room.look()
        room.say(0, "together")
    room.look(9.0)
    assert room.failed == []
    room.look(2.0)
    assert [failure.rank for failure in room.failed] == [1]
    assert room.why[0].startswith("rank 2 ")
    assert not room.fail(0), "the job ends"


def test_what_keeps_them_from_it() -> None:
    room = Room(3, fewest=2)
    assert room.fail(1)
    assert not room.fail(2)
    assert ([failure.rank for failure in room.failed], room.why) == ([1], ["too few are left"])
    room = Room(3)
    room.say(2, "over")
    assert room.wires[2].last == "ok"
    assert not room.fail(1)
    assert room.why == ["rank 2, in no function of elastic.run at that moment"]
    room = Room(3)
    room.say(2, "outlives", rank=2, call=1)
    assert not room.fail(1)
    assert room.why == ["the ranks are in different calls of elastic.run"]
    room = Room(3)
    room.fail(1)
    room.say(2, "cannot", why="it uses a GPU")
    assert ([failure.rank for failure in room.failed], room.why) == ([1], ["rank 2: it uses a GPU"])
    room = Room(3)
    room.ranks[1].gone = True
    assert not room.fail(1)
    assert not room.granted


def test_a_rank_that_returns_while_others_go_on_is_needed() -> None:
    room = Room(3)
    room.fail(1)
    room.say(0, "over")
    assert [kind for kind, _ in room.wires[0].sent] == ["ok", "lost", "ok"]
    room.say(0, "again")
    room.say(2, "again")
    room.look()
    assert room.granted == [[0, 2]]


def test_ranks_that_the_job_has_not_are_refused() -> None:
    room = Room(2)
    for number in (-1, 2):
        with pytest.raises(ProtocolError, match="which this job has not"):
            room.say(0, "outlives", rank=number, call=0)
    room.survivors.forget(room.wires[1])  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="has not said which it is"):
        room.say(1, "again")
    room.fail(1)
    with pytest.raises(ProtocolError, match="which this job has not"):
        room.say(1, "outlives", rank=1, call=0)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["fail", "again", "together", "look", "over"]), st.integers(0, 3)), max_size=40)
)
def test_any_order_of_events(events: list[tuple[str, int]]) -> None:
    """Each failure is got over, or reported once; and only all ranks that are left are ever granted a generation."""
    room, absorbed = Room(4, fewest=2), set()
    asked: set[int] = set()
    for kind, number in events:
        before = len(room.granted)
        if number not in room.ranks.left and kind != "look":
            continue
        if kind == "fail":
            asked.discard(number)
            if room.fail(number):
                absorbed.add(number)
        elif kind == "look":
            room.look(0.1)
        else:
            asked |= {number} if kind == "again" else set()
            room.say(number, kind)
        if len(room.granted) > before:
            assert set(room.granted[-1]) == set(room.ranks.left) <= asked
            assert len(room.granted[-1]) >= 2
            asked.clear()
    reported = [failure.rank for failure in room.failed]
    assert len(set(reported)) == len(reported)
    assert set(reported) <= absorbed


@pytest.mark.weekly
@pytest.mark.timeout(LIMIT + 20)
def test_five_faults(tmp_path: Path) -> None:
    """They go on with two ranks or more, and start again with four later. ``scripts/faults --elastic --fewest 2`` runs many."""
    (faults,) = choose(SEED, 5, ranks=2)
    training = Training(faults, tmp_path, fewest=2)
    assert training.end() == []
    assert training.recoveries


@pytest.mark.timeout(150)
def test_torch(start: Start, tmp_path: Path) -> None:
    """The optimizers that were made before the function go on with fewer ranks, after a backward pass that was cut short."""
    from tests.programs.survivors_torch import AT, STEPS, main

    words = ("-np", "3", "--min-np", "2", "--no-tag-output", str(PROGRAMS / "survivors_torch.py"), str(tmp_path))
    ended = start(*words).end(120)
    assert ended.code == 0, ended.out + ended.err
    said = {word: ast.literal_eval(text) for word, text in re.findall(r"^(\w+) ([\d\[].*)$", ended.out, re.MULTILINE)}
    assert (said["sizes"], said["processes"]) == ([3] * AT + [2] * (STEPS - AT), 1)
    weights = on_ranks(1, main, config=Config(advice=False))[0][2]  # one process, with the rows of all ranks
    assert said["weights"] == pytest.approx(weights[::500].tolist(), rel=1e-4, abs=1e-6)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--always-restart", "--verbose"], "all processes are started again: --always-restart was given."),
        (["--verbose"], "cannot go on in their processes: rank 0: it has process sets."),
    ],
)
@pytest.mark.slow
def test_why_they_start_again(start: Start, tmp_path: Path, options: list[str], why: str) -> None:
    env = {"COUNTER_FOLDER": str(tmp_path), "COUNTER_STEPS": "9", "COUNTER_FAULTS": "0.kill.1.5.step.0"}
    env["COUNTER_SETS"] = "0" if "--always-restart" in options else "1"
    ended = start("-np", "2", "--min-np", "1", *options, COUNTER, env=env).end(60)
    assert ended.code == 0, ended.err
    assert f"hvdliterun: {'the other ranks ' if 'sets' in why else 'after a failure '}{why}" in ended.err
    assert "start again (number 1) with 2 ranks" in ended.err
    assert "from commit number 5." in ended.err


@pytest.mark.costly
@pytest.mark.parametrize("place", ["step", "end"])
def test_a_rank_that_hangs_is_the_one_that_has_failed(start: Start, tmp_path: Path, place: str) -> None:
    """The others wait for it: in an exchange, from which they go on; or at their ends, and all start again."""
    env = {"COUNTER_FOLDER": str(tmp_path), "COUNTER_STEPS": "9"}
    env["COUNTER_FAULTS"] = f"0.hang.2.{5 if place == 'step' else 9}.{place}.0"
    limits = ("--stall-check-warning-time-seconds", "2", "--stall-check-shutdown-time-seconds", "4")
    ended = start("-np", "3", "--min-np", "2", *limits, "--no-tag-output", COUNTER, env=env).end(60)
    assert ended.code == 0, ended.err
    (failed,) = re.findall(r"^hvdliterun: (rank \d) on host \S+ failed", ended.err, re.MULTILINE)
    assert failed == "rank 2", "the one that hangs, and none of those that wait for it"
    assert "rank 2 is missing; it is here:" in ended.err and 'elastic_counter.py", line' in ended.err
    if place == "step":
        assert "hvdliterun: 2 ranks go on in their processes (number 1), from commit number 5" in ended.err
        assert "9 steps, counted {np.int64(1)} times and 9 in all, sizes [3, 2]" in ended.out
    else:
        assert "hvdliterun: start again (number 1) with 3 ranks on localhost:3, from commit number 9" in ended.err
        assert ended.out.count("9 steps, counted {np.int64(1)} times and 9 in all, sizes [3]") == 2, ended.out


def test_horovods_variables_follow() -> None:
    environ = {HOROVOD_VARIABLE: "4", "HOROVOD_RANK": "3", "HOROVOD_SIZE": "4"}
    renumber_horovod_variables(1, 2, 1, 2, environ)
    assert (environ["HOROVOD_RANK"], environ["HOROVOD_LOCAL_RANK"], environ["HOROVOD_SIZE"]) == ("1", "1", "2")
    renumber_horovod_variables(1, 2, 1, 2, others := {})
    assert others == {}


def test_an_interrupt_ends_waits_now_and_later() -> None:
    from mpi4py import MPI

    from hvdlite.comm.interrupt import Interrupt
    from hvdlite.comm.mpi.transport import MpiTransport

    interrupt = Interrupt()
    transport = MpiTransport(MPI.COMM_SELF, interrupt)
    copy = transport.duplicate()
    assert not copy.has_message()
    interrupt.set("rank 3 has failed")
    for call in (lambda: copy.call("Barrier"), copy.poll, copy.duplicate):
        with pytest.raises(PeerLeftError, match="rank 3 has failed"):
            call()
    assert copy.has_message()
