"""Large data between hosts over connections of our own: ranks are threads here, and their hosts are this machine."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.algorithms.slices import slices
from hvdlite.comm.interrupt import Interrupt
from hvdlite.comm.local import LocalFabric, LocalTransport
from hvdlite.comm.point_to_point import PointToPointCollectives
from hvdlite.comm.sockets import collectives as by_sockets
from hvdlite.comm.sockets import links, meeting
from hvdlite.comm.sockets.collectives import SocketCollectives
from hvdlite.comm.sockets.endpoint import SocketEndpoint
from hvdlite.comm.sockets.meeting import start
from hvdlite.config import Config
from hvdlite.errors import ArgumentError, CommunicationError, HvdliteError, PeerLeftError
from hvdlite.launcher_link.link import Address, connect
from hvdlite.protocols import ReduceOp
from hvdlite.ranks.network import nearest_first, own_addresses

SECRET = "what the ranks of this job alone know"
HERE = ["127.0.0.1/8"]
LONG = 30.0  # a wait that never takes so long
MANY = 3_000_000  # elements of which the buffers of a connection hold a part only

Body = Callable[[SocketCollectives], Any]


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_ALONE_SECONDS", 0.2)
    monkeypatch.setattr(meeting, "_SECONDS", 0.5)


@contextlib.contextmanager
def collectives(
    transport: LocalTransport, endpoint: SocketEndpoint | None = None, **options: Any
) -> Iterator[SocketCollectives]:
    endpoint = endpoint or SocketEndpoint(SECRET, addresses=HERE)
    made = SocketCollectives(PointToPointCollectives(transport), endpoint, large_bytes=1, **options)
    try:
        yield made
    finally:
        made.close()
        endpoint.close()


def run(size: int, body: Body, **options: Any) -> list[Any]:
    def rank(transport: LocalTransport) -> Any:
        with collectives(transport, **options) as ours:
            return body(ours)

    return LocalFabric(size).run(rank, timeout=LONG)


def values(rank: int, size: int, dtype: str) -> np.ndarray:
    return (np.random.default_rng([rank, size]).standard_normal(size) * 3).astype(dtype)


SIZES = st.one_of(st.integers(1, 40), st.integers(1_000, 5_000))


@settings(max_examples=25)
@given(st.integers(2, 4), SIZES, st.sampled_from(["float32", "float64", "int32", "int8", "bool"]), st.integers(1, 300))
def test_all_collectives(ranks: int, size: int, dtype: str, piece: int) -> None:
    there = [values(rank, size, dtype) for rank in range(ranks)]
    drawn = np.random.default_rng([ranks, size, piece])
    counts = drawn.multinomial(size, drawn.dirichlet(np.ones(ranks))).tolist()
    table = drawn.integers(0, 50, (ranks, ranks)) * (drawn.random((ranks, ranks)) < 0.8)
    root = int(drawn.integers(ranks))

    def body(ours: SocketCollectives) -> dict[str, np.ndarray]:
        rank, found = ours.rank, {}
        for op in (ReduceOp.SUM, ReduceOp.MAX):
            found[op.name] = there[rank].copy()
            ours.allreduce(found[op.name], op)
        found["scattered"] = np.empty(counts[rank], dtype)
        ours.reduce_scatter(there[rank], found["scattered"], counts, ReduceOp.MIN)
        found["gathered"] = np.empty(size, dtype)
        ours.allgather(there[rank][: counts[rank]], found["gathered"], counts)
        found["broadcast"] = there[rank].copy()
        ours.broadcast(found["broadcast"], root)
        sent = np.repeat(np.arange(ranks) + 10 * rank, table[rank]).astype(np.int16)
        found["all"] = np.empty(table[:, rank].sum(), np.int16)
        ours.alltoall(sent, table[rank].tolist(), found["all"], table[:, rank].tolist())
        assert ours._links is not None
        return found

    with pytest.MonkeyPatch.context() as patch:  # many messages and chunks for a few elements
        patch.setattr(by_sockets, "_SLICE_BYTES", 8 * piece)
        patch.setattr(links, "CHUNK_BYTES", 8 * -(-piece // 2))
        found = run(ranks, body)
    stacked = np.stack(there)
    for rank, each in enumerate(found):
        if stacked.dtype.kind == "f":
            np.testing.assert_allclose(each["SUM"], stacked.sum(0), rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(each["SUM"], np.add.reduce(stacked, 0, dtype=dtype))
        assert each["SUM"].tobytes() == found[0]["SUM"].tobytes()
        np.testing.assert_array_equal(each["MAX"], stacked.max(0))
        np.testing.assert_array_equal(each["scattered"], stacked.min(0)[slices(counts)[rank]])
        np.testing.assert_array_equal(
            each["gathered"], np.concatenate([x[:n] for x, n in zip(there, counts, strict=True)])
        )
        np.testing.assert_array_equal(each["broadcast"], there[root])
        np.testing.assert_array_equal(each["all"], np.repeat(10 * np.arange(ranks) + rank, table[:, rank]))


def test_large_data_and_small_data() -> None:
    def body(ours: SocketCollectives) -> tuple[float, bool, float]:
        small, large = np.full(10, ours.rank, np.float32), np.full(MANY, ours.rank, np.float32)
        ours._large_bytes = large.nbytes
        ours.allreduce(small, ReduceOp.SUM)
        before = ours._links is None
        ours.allreduce(large, ReduceOp.SUM)
        return float(small[0]), before and ours._links is not None, float(np.unique(large).item())

    assert run(3, body) == [(3.0, True, 3.0)] * 3


def test_duplicates_do_not_mix() -> None:
    """Two threads of each rank, whose messages would be the same."""

    def body(ours: SocketCollectives) -> list[set[float]]:
        other = ours.duplicate()
        found = [np.full(200_000, each, np.float32) for each in (1, 10)]

        def repeat(each: SocketCollectives, data: np.ndarray) -> None:
            for _ in range(5):
                each.allreduce(data, ReduceOp.SUM)

        thread = threading.Thread(target=repeat, args=(other, found[1]))
        thread.start()
        repeat(ours, found[0])
        thread.join()
        other.close()
        return [set(data.tolist()) for data in found]

    assert run(2, body) == [[{2.0**5}, {10 * 2.0**5}]] * 2


# ---- failures ----


def outcome(ours: SocketCollectives, size: int = MANY) -> str:
    try:
        ours.allreduce(np.zeros(size, np.float32), ReduceOp.SUM)
    except HvdliteError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def waits_until(act: Callable[[SocketCollectives, Interrupt], object]) -> list[str]:
    """Rank 0 waits for rank 1, which acts: what has become of rank 0's wait, and of its next call."""
    of_rank_0: list[tuple[SocketCollectives, Interrupt]] = []
    ready = threading.Barrier(2)

    def rank(transport: LocalTransport) -> list[str]:
        interrupt = Interrupt()
        with collectives(transport, interrupt=interrupt) as ours:
            outcome(ours, 10)
            if ours.rank == 0:
                of_rank_0.append((ours, interrupt))
                ready.wait()
                return [outcome(ours), outcome(ours)]
            ready.wait()
            act(*of_rank_0[0]) if act is not leave else leave(ours, interrupt)
            return []

    return LocalFabric(2).run(rank, timeout=LONG)[0]


def leave(ours: SocketCollectives, _: Interrupt) -> None:
    assert ours._links is not None
    ours._links.close()


def test_the_watchdog_ends_a_wait() -> None:
    said = waits_until(lambda other, _: other.stop(PeerLeftError("rank 1 has left")))
    assert said == ["PeerLeftError: rank 1 has left"] * 2


def test_the_end_of_a_world_ends_a_wait() -> None:
    assert waits_until(lambda _, interrupt: interrupt.set("go on")) == ["PeerLeftError: go on"] * 2


@pytest.mark.usefixtures("_impatient")
def test_a_rank_that_is_gone() -> None:
    said = waits_until(leave)
    assert said[0].startswith("CommunicationError: a connection between hosts has ended: to 127.0.0.1: ")
    assert said[1] == said[0]


def test_who_knows_why_a_rank_is_gone_says_it_first() -> None:
    """The connection ends before the watchdog has heard of it, as when a process is killed."""

    def act(other: SocketCollectives, _: Interrupt) -> None:
        assert other._links is not None
        links._shut_down(other._links._streams)
        threading.Timer(0.3, other.stop, [PeerLeftError("rank 1 was killed")]).start()

    assert waits_until(act)[0] == "PeerLeftError: rank 1 was killed"


@pytest.mark.usefixtures("_impatient")
def test_ranks_that_are_not_in_step() -> None:
    said = run(2, lambda ours: (outcome(ours, 10), outcome(ours, 1_000 + ours.rank)))
    assert [before for before, _ in said] == ["done"] * 2
    assert any("rank 1 of the group has sent " in text and "not in step" in text for _, text in said)
    assert all(text.startswith("CommunicationError") for _, text in said)


@pytest.mark.usefixtures("_impatient")
def test_an_exception_in_the_middle() -> None:
    """The others are told by the watchdog; without one, the connection tells them."""

    def body(ours: SocketCollectives) -> str:
        outcome(ours, 10)
        if ours.rank == 0:
            return outcome(ours)
        assert ours._links is not None

        def interrupted(send: by_sockets.Send) -> None:
            send(0, np.zeros(MANY, np.float32))
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ours._links.exchange(interrupted)
        return outcome(ours)

    waiting, left = run(2, body)
    assert left.startswith("CommunicationError: this rank has left an exchange between hosts in the middle")
    assert waiting.startswith("CommunicationError: ")


# ---- connecting ----


def test_strangers_are_closed_and_counted() -> None:
    ready = threading.Barrier(2)

    def rank(transport: LocalTransport) -> tuple[str, bool]:
        endpoint = SocketEndpoint(SECRET, addresses=HERE)
        with collectives(transport, endpoint) as ours:
            for talk in (b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, b"\0" * 64):
                with socket.create_connection(("127.0.0.1", endpoint.card.port), LONG) as stranger:
                    stranger.sendall(talk)
                    with contextlib.suppress(ConnectionError):
                        while stranger.recv(1000):
                            pass
            with pytest.raises(OSError):
                connect(Address("127.0.0.1", endpoint.card.port, "another secret"), 1.0)
            ready.wait()
            return outcome(ours, 10), endpoint.strangers >= 3

    assert LocalFabric(2).run(rank, timeout=LONG) == [("done", True)] * 2


def test_a_rank_refuses_what_is_for_another() -> None:
    """Addresses such as that of docker0 exist on many hosts: who dials them may find itself."""
    one, other = (SocketEndpoint(SECRET, addresses=HERE) for _ in range(2))
    try:
        wrong = type(other.card)(other.card.name, HERE, one.card.port)
        with pytest.raises(OSError, match=f"127.0.0.1 port {one.card.port}: the launcher closed the connection"):
            other.dial(wrong, "group", 0)
        assert one.strangers == 0
    finally:
        one.close()
        other.close()


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def test_ports() -> None:
    port = free_port()
    first = SocketEndpoint(SECRET, range(port, port + 1), addresses=HERE)
    second = SocketEndpoint(SECRET, range(port, port + 1), addresses=HERE)
    try:
        assert (first.card.port, first.card.problem) == (port, "")
        assert "in use" in second.card.problem
    finally:
        first.close()
        second.close()


def unreachable(required: bool) -> tuple[list[Any], list[str]]:
    """Two ranks of which the second cannot reach the first: what became of an allreduce, and what was said."""

    def rank(transport: LocalTransport) -> str | float:
        endpoint = SocketEndpoint(SECRET, addresses=HERE)
        if transport.rank == 0:
            card = endpoint.card
            endpoint.card = type(card)(card.name, card.addresses, free_port())
        with collectives(transport, endpoint, required=required) as ours:
            try:
                for _ in range(2):
                    data = np.ones(10, np.float32)
                    ours.allreduce(data, ReduceOp.SUM)
                other = ours.duplicate()
                other.allreduce(data, ReduceOp.SUM)
                other.close()
            except CommunicationError as error:
                return str(error)
            return float(data[0])

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hvdlite").addHandler(handler)
    try:
        return LocalFabric(2).run(rank, timeout=LONG), records
    finally:
        logging.getLogger("hvdlite").removeHandler(handler)


@pytest.mark.usefixtures("_impatient")
def test_hosts_that_cannot_connect_use_mpi() -> None:
    found, said = unreachable(required=False)
    assert found == [4.0, 4.0]
    assert len(said) == 1
    assert "large data between hosts goes by MPI" in said[0] and "to 127.0.0.1/8: 127.0.0.1 port" in said[0]


@pytest.mark.usefixtures("_impatient")
def test_hosts_that_must_connect() -> None:
    found, _ = unreachable(required=True)
    assert found[0] == found[1] and "the hosts cannot connect to each other" in found[0]


def test_the_ranks_agree_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdlite.comm.sockets.meeting.has_fabric", lambda: False)

    def begin(ways: list[str], transport: LocalTransport) -> str:
        try:
            endpoint = start(PointToPointCollectives(transport), Config(between_hosts=ways[transport.rank]))
        except ArgumentError as error:
            return str(error)
        if endpoint is None:
            return "mpi"
        endpoint.close()
        return "sockets"

    for ways, expected in (
        (["auto", "auto"], "sockets"),
        (["mpi", "mpi"], "mpi"),
        (["auto", "mpi"], "HVDLITE_BETWEEN_HOSTS is 'auto' on rank 0 and 'mpi' on rank 1"),
    ):
        found = LocalFabric(2).run(partial(begin, ways), timeout=LONG)
        assert all(each.startswith(expected) for each in found), found
    monkeypatch.setattr("hvdlite.comm.sockets.meeting.has_fabric", lambda: True)
    assert LocalFabric(2).run(partial(begin, ["auto", "auto"]), timeout=LONG) == ["mpi", "mpi"]
    assert LocalFabric(2).run(partial(begin, ["sockets", "sockets"]), timeout=LONG) == ["sockets", "sockets"]


def test_addresses() -> None:
    assert nearest_first(["172.17.0.1/16", "10.1.2.3/8", "fd00::1/64"], ["10.0.0.5/8"])[0] == "10.1.2.3"
    with pytest.raises(OSError, match="has no address for other hosts on nothing0; it has "):
        own_addresses(["nothing0"])


@pytest.mark.parametrize(
    "wrong", [{"between_hosts": "gloo"}, {"ports": "31000"}, {"ports": "2-1"}, {"ports": "1-70000"}]
)
def test_settings(wrong: dict[str, str]) -> None:
    with pytest.raises(ArgumentError, match="HVDLITE_"):
        Config(**wrong)  # type: ignore[arg-type]
