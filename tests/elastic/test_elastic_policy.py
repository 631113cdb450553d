"""What comes after each generation of an elastic job, decided without processes and without a clock."""

from __future__ import annotations

import contextlib
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.errors import LaunchError
from hvdlite.launch.elastic.discovery import LIMIT, Discovery, Newcomers, parse, words_of
from hvdlite.launch.elastic.policy import FRUITLESS, End, Ended, Limits, Policy, Start, Wait
from hvdlite.launch.job.failures import Failure, cause, is_from_outside
from hvdlite.launch.job.hosts import Host
from hvdlite.launcher_link.generation import ADDED, REMOVED, CommitId, Generation
from tests.support.jobs import wait_for

NODES = [Host("a", 2), Host("b", 2), Host("c", 2)]
COOLDOWN = (10.0, 40.0)


def policy(hosts: list[Host], first: int = 2, fewest: int = 2, **limits: object) -> Policy:
    made = Policy(Limits(first, fewest, cooldown=COOLDOWN, **limits), random.Random(0))  # type: ignore[arg-type]
    made.take_hosts(hosts)
    return made


def started(made: Policy, now: float = 0.0) -> Start:
    step = made.next(now)
    assert isinstance(step, Start), step
    return step


def names(step: Start) -> list[str]:
    return [host.name for host in step.hosts]


def test_all_slots_are_used_up_to_the_most() -> None:
    assert started(policy(NODES)).num_proc == 6
    step = started(policy(NODES, most=3))
    assert (step.num_proc, step.hosts) == (3, (Host("a", 2), Host("b", 1)))


def test_a_host_with_a_failed_rank_is_set_aside_and_comes_back() -> None:
    made = policy(NODES[:2])
    started(made)
    made.committed()
    made.ended(1.0, Ended(failed=frozenset("b")))
    assert names(started(made, 1.0)) == ["a"]
    assert made.update(5.0) == 0
    assert made.newcomers(5.0) == ()
    assert made.newcomers(14.0) == (NODES[1],)
    assert made.update(14.0) == ADDED
    assert made.newcomers(14.0) == ()
    assert made.update(15.0) == 0  # it is told once
    made.committed()
    made.ended(16.0, Ended(left=True))
    assert names(started(made, 16.0)) == ["a", "b"]
    made.ended(17.0, Ended(failed=frozenset("b")))
    started(made, 17.0)
    assert made.update(17.0 + 19.0) == 0, "the second time is twice as long"
    assert made.update(17.0 + 26.0) == ADDED


def test_the_only_host_is_used_at_once() -> None:
    made = policy(NODES[:1])
    for now in range(5):
        assert names(started(made, now)) == ["a"]
        made.committed()
        made.ended(now, Ended(failed=frozenset("a")))


def test_a_host_that_cannot_be_reached_is_waited_for() -> None:
    made = policy(NODES[:1], wait=100.0)
    started(made)
    made.ended(0.0, Ended(started=False, unreachable=frozenset("a")))
    step = made.next(5.0)
    assert isinstance(step, Wait)
    assert "set aside after a failure: a" in step.why
    started(made, 13.0)
    made.ended(14.0, Ended(started=False, unreachable=frozenset("a")))
    assert isinstance(made.next(20.0), Wait)
    end = made.next(101.0)
    assert isinstance(end, End)
    assert "there are 2 slots (a:2) and 2 are needed" in end.why


def test_a_generation_needs_a_host_that_has_the_committed_state() -> None:
    made = policy(NODES[:1])
    started(made)
    made.committed()
    made.take_hosts(NODES[1:])
    assert made.update(1.0) & REMOVED
    made.ended(2.0, Ended(left=True))
    step = made.next(2.0)
    assert isinstance(step, Wait)
    assert "the committed state is in the memory of a, which are gone" in step.why
    made.take_hosts(NODES)
    assert names(started(made, 3.0)) == ["a", "b", "c"]


def test_the_host_that_has_the_state_stays_though_a_rank_failed_there() -> None:
    made = policy(NODES[:1])
    started(made)
    made.committed()
    made.take_hosts(NODES[:2])
    made.ended(1.0, Ended(failed=frozenset("a")))
    assert names(started(made, 1.0)) == ["a", "b"]


@pytest.mark.parametrize("committed", [True, False])
def test_failures_without_a_commit_end_the_job(committed: bool) -> None:
    made = policy(NODES[:1])
    for _ in range(FRUITLESS):
        started(made)
        if committed:
            made.committed()
        made.ended(0.0, Ended(failed=frozenset("a")))
    step = made.next(0.0)
    assert isinstance(step, Start if committed else End)


def test_only_the_same_failure_again_and_again_ends_the_job() -> None:
    """Failures in different ways do not, nor do ranks that somebody kills, unless it goes on for too long."""
    made = policy(NODES[:1])
    for why in ("a", "a", "b", None, "a", None, "b", "b", None):
        started(made)
        made.ended(0.0, Ended(failed=frozenset("a"), cause=why))
    started(made)  # it has gone on
    made.ended(0.0, Ended(failed=frozenset("a"), cause="b"))
    end = made.next(0.0)
    assert isinstance(end, End)
    assert end.why == "3 generations in a row have failed in the same way before they committed anything"

    patient = Policy(Limits(1, 1, fruitless=4))
    patient.take_hosts(NODES[:1])
    for count in range(20):
        started(patient)
        patient.ended(0.0, Ended(failed=frozenset("a"), cause=None if count % 4 else str(count)))
    end = patient.next(0.0)
    assert isinstance(end, End)
    assert end.why == "20 generations in a row have failed before they committed anything"


def test_what_failures_have_in_common() -> None:
    def failure(text: str, code: int = 1, rank: int | None = 0) -> Failure:
        return Failure(text, code, 0.0, rank)

    def trace(line: int, error: str) -> str:
        return f'Traceback (most recent call last):\n  File "a.py", line {line}, in f\n    g()\n{error}\n'

    first = cause(failure(trace(3, "ValueError: sample 17")))
    assert first == cause(failure(trace(3, "ValueError: sample 18"), rank=1))
    assert first != cause(failure(trace(3, "KeyError: 17"))) and first != cause(
        failure(trace(4, "ValueError: sample 17"))
    )
    exits = cause(failure("rank 1 (node1, pid 4711) ended with exit code 3.", 3, 1))
    assert exits == cause(failure("rank 0 (node2, pid 3) ended with exit code 3.", 3, 0)) != first
    killed = failure("rank 1 (node1, pid 4711) was killed by SIGKILL.", 137, 1)
    assert is_from_outside(killed) and not is_from_outside(failure("rank 1 ended with exit code 3.", 3))


def test_the_limit_of_restarts() -> None:
    made = policy(NODES[:1], restarts=1)
    for _ in range(2):
        started(made)
        made.committed()
        made.ended(0.0, Ended(failed=frozenset("a")))
    end = made.next(0.0)
    assert isinstance(end, End)
    assert "--reset-limit" in end.why


def test_more_hosts_than_can_be_used_interrupt_nobody() -> None:
    made = policy(NODES[:1], most=2)
    started(made)
    made.take_hosts(NODES)
    assert made.update(1.0) == 0
    made.take_hosts(NODES[1:])
    assert made.update(2.0) == REMOVED | ADDED


def test_the_first_generation_waits_for_all_its_ranks() -> None:
    made = policy(NODES[:1], first=4)
    assert isinstance(made.next(0.0), Wait)
    made.take_hosts(NODES[:2])
    assert started(made, 1.0).num_proc == 4
    made.committed()
    made.ended(2.0, Ended(unreachable=frozenset("b")))
    assert names(started(made, 3.0)) == ["a"]


@pytest.mark.parametrize("end", [Ended(good=True), Ended(final=True)])
def test_the_end_is_the_end(end: Ended) -> None:
    made = policy(NODES)
    started(made)
    made.ended(1.0, end)
    assert made.next(1.0) == made.next(99.0)
    assert isinstance(made.next(1.0), End)


def test_a_script_that_does_not_end_is_given_up_and_the_hosts_stay() -> None:
    said: list[str] = []
    discovery = Discovery(words_of("echo a:2"), 1, said.append)
    wait_for(lambda: bool(discovery.poll(0.0)) or discovery.hosts is not None, 60)
    discovery._words = words_of("sleep 600")
    for now in (2.0, 3.0, 2.0 + LIMIT + 0.1):
        discovery.poll(now)
    assert said == ["it does not end: it was given up after 30 s"]
    assert discovery.hosts == (Host("a", 2),)
    discovery.poll(4.0 + LIMIT)  # it is called again
    discovery.close()


def test_a_script_that_prints_for_ever_is_ended_before_it_fills_the_disk() -> None:
    said: list[str] = []
    discovery = Discovery(words_of("yes localhost:2"), 1, said.append)
    wait_for(lambda: bool(discovery.poll(0.0)) or bool(discovery.problem), 60)
    assert discovery.problem == "it printed more than 1 MiB; expected lines host:slots"
    discovery.close()


def test_new_hosts_are_tried_before_they_are_used() -> None:
    gates = {name: threading.Event() for name in "abc"}
    asked = []

    def answers(name: str) -> bool:
        asked.append(name)
        assert gates[name].wait(60)
        return name != "b"

    tried = Newcomers(answers)
    assert tried.are_there([])
    assert not tried.are_there(NODES[:2])
    gates["a"].set()
    wait_for(lambda: tried.are_there(NODES[:1]), 60)
    assert not tried.are_there(NODES[:2])
    assert tried.missing() == []
    gates["b"].set()
    wait_for(lambda: tried.missing() == ["b"], 60)
    assert tried.are_there(NODES[:1])
    assert sorted(asked) == ["a", "b", "b"], "what was found of a host is forgotten when it is not asked for"
    assert Newcomers(None).are_there(NODES)


_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["commit", "fail", "unreachable", "left", "hosts", "pass", "look"]),
        st.sets(st.sampled_from("abc")),
        st.floats(0.0, 30.0),
    ),
    max_size=60,
)


def test_ranks_that_are_left_go_on_and_the_slot_is_used_again_later() -> None:
    made = policy([Host("a", 4)])
    started(made)
    made.committed()
    assert made.why_not_without(["a"]) == ""
    assert made.lose(1.0, ["a"]) == 2
    assert (made.present, made.restarts) == (3, 1)
    assert made.update(10.0) == 0, "the slot is set aside for ten seconds at least"
    assert made.update(14.0) == ADDED
    assert made.why_not_without(["a"]) == "hosts have changed"
    made.ended(15.0, Ended(left=True))
    step = started(made, 15.0)
    assert (step.generation, step.num_proc) == (3, 4)


def test_what_keeps_ranks_from_going_on() -> None:
    made = policy([Host("a", 4)], fewest=3)
    started(made)
    assert "2 are left, and 3 are needed" in made.why_not_without(["a", "a"])
    made = policy([Host("a", 4)], restarts=1)
    started(made)
    made.committed()
    made.lose(1.0, ["a"])
    made.committed()
    assert "--reset-limit" in made.why_not_without(["a"])
    made = policy([Host("a", 4)])
    started(made)
    for _ in range(FRUITLESS - 1):
        assert made.why_not_without(["a"]) == ""
        made.lose(1.0, ["a"])
    assert "before they committed anything" in made.why_not_without([])


@settings(max_examples=200, deadline=None)
@given(
    events=_EVENTS,
    fewest=st.integers(1, 4),
    more=st.integers(0, 3),
    most=st.integers(0, 3) | st.none(),
    restarts=st.integers(0, 8) | st.none(),
)
def test_any_order_of_events(
    events: list[tuple[str, set[str], float]], fewest: int, more: int, most: int | None, restarts: int | None
) -> None:
    """Never more ranks than allowed, never fewer, never on hosts that are not there or have nothing; and no change is lost."""
    first = fewest + more
    limits = Limits(
        first, fewest, None if most is None else first + most, wait=60.0, restarts=restarts, cooldown=COOLDOWN
    )
    made = Policy(limits, random.Random(1))
    there = {"a", "b", "c"}
    made.take_hosts(NODES)
    now, running, starts, holders, fruitless, has_committed, told = 0.0, None, 0, set[str](), 0, False, False
    for kind, some, seconds in events:
        now += seconds
        if running is None:
            step = made.next(now)
            if isinstance(step, End):
                assert made.next(now + 1) == step
                assert "--reset-limit" in step.why or "--elastic-timeout" in step.why or fruitless >= FRUITLESS
                return
            if isinstance(step, Start):
                starts += 1
                assert step.generation == starts
                assert restarts is None or starts - 1 <= restarts
                assert (first if starts == 1 else fewest) <= step.num_proc <= (limits.most or 6)
                assert set(names(step)) <= there
                assert all(1 <= host.slots <= 2 for host in step.hosts)
                assert not holders or step.hosts[0].name in holders
                running, has_committed, told = step, False, False
            else:
                assert step.why
        mine = set(names(running)) if running is not None else set()
        match kind:
            case "hosts":
                there = some
                made.take_hosts([host for host in NODES if host.name in there])
            case "commit" if running is not None:
                made.committed()
                holders, has_committed = mine, True
            case "look" if running is not None:
                update = made.update(now)
                assert not (update and told)
                told = told or bool(update)
                if mine - there and sum(2 for _ in there) >= fewest and (not holders or holders & there):
                    assert told, "hosts that the job uses have left"
            case "fail" | "unreachable" if running is not None and some & mine:
                hosts = frozenset(some & mine)
                made.ended(now, Ended(**{"failed" if kind == "fail" else kind: hosts}))  # type: ignore[arg-type]
                fruitless = 0 if has_committed else fruitless + (kind == "fail")
                running = None
            case "left" if running is not None and told:
                made.committed()
                holders = mine
                made.ended(now, Ended(left=True))
                running, fruitless = None, 0
    if running is None and isinstance(
        made.next(now), Wait
    ):  # whatever has happened, it starts within its limits, or ends
        assert not isinstance(made.next(now + 61.0), Wait)


def test_the_lines_of_a_discovery_script() -> None:
    assert parse(b"node1:4\n\n  node2\nnode3:1", 3) == (Host("node1", 4), Host("node2", 3), Host("node3", 1))
    assert parse(b"", 1) == ()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"node1:x\n", "'x' slots for node1"),
        (b"node1:0\n", "from 1 to"),
        (b"a:1\nnode 2\n", "line 2, 'node 2'"),
        (b"<html>\n", "'<html>' is not a host name"),
        (b"a:1\na:2\n", "the host a comes twice"),
        (b"\xff\xfe\n", "no text"),
        (b"x" * (1 << 21), "more than 1 MiB"),
    ],
)
def test_rubbish_of_a_discovery_script(data: bytes, words: str) -> None:
    with pytest.raises(LaunchError, match=words.replace("(", r"\(")):
        parse(data, 1)


@given(st.binary(max_size=200))
def test_any_bytes_of_a_discovery_script_are_hosts_or_an_error(data: bytes) -> None:
    with contextlib.suppress(LaunchError):
        assert all(host.slots == 2 or b":" in data for host in parse(data, 2))


@given(st.integers(1, 10**6), st.lists(st.builds(CommitId, st.integers(0, 9), st.integers(0, 99))))
def test_a_generation_as_text(number: int, commits: list[CommitId]) -> None:
    generation = Generation(number, "00ff", "/dev/shm/a:b", tuple(commits))
    assert Generation.parse(str(generation)) == generation
    assert "00ff" not in repr(generation)


@given(st.text(max_size=40))
def test_any_text_is_a_generation_or_an_error_without_its_secret(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert Generation.parse(text).number == int(text.split(":")[0])
    with pytest.raises(ValueError, match="only hvdliterun sets it") as caught:
        Generation.parse("1:2:secret")
    assert "secret" not in str(caught.value)
