"""Ranks as threads: messages, letters, groups, failures and virtual time."""

from __future__ import annotations

import queue
import threading
import time

import numpy as np
import pytest

from hvdlite.algorithms.ring import ring
from hvdlite.comm.local import LocalFabric, LocalTransport, Network, Traffic
from hvdlite.errors import ArgumentError, PeerLeftError
from hvdlite.protocols import ReduceOp, Transport, numpy_combine

TIMEOUT = 20.0


def number(value: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.full(1, value)


def received(transport: Transport, source: int) -> float:
    """The one number that `source` has sent."""
    data = number(-1)
    transport.recv(data, source)
    return float(data[0])


# Messages


def test_messages_arrive_in_order_and_are_copies() -> None:
    def on_rank(transport: LocalTransport) -> list[float] | None:
        if transport.rank == 0:
            data = number(0)
            for value in range(100):
                data[0] = value
                transport.send(data, 1)
            data[0] = -1
            return None
        return [received(transport, 0) for _ in range(100)]

    assert LocalFabric(2).run(on_rank, TIMEOUT)[1] == list(range(100))


def test_each_pair_has_its_own_order() -> None:
    def on_rank(transport: LocalTransport) -> list[float]:
        if transport.rank:
            transport.send(number(transport.rank), 0)
            return []
        return [received(transport, source) for source in (3, 1, 2)]

    assert LocalFabric(4).run(on_rank, TIMEOUT)[0] == [3, 1, 2]


def test_sendrecv_around_a_ring_and_to_oneself() -> None:
    def on_rank(transport: LocalTransport) -> tuple[float, float]:
        left, own = number(-1), number(-1)
        rank, size = transport.rank, transport.size
        transport.sendrecv(number(rank), (rank + 1) % size, left, (rank - 1) % size)
        transport.sendrecv(number(rank), rank, own, rank)
        return left[0], own[0]

    assert LocalFabric(3).run(on_rank, TIMEOUT) == [(2, 0), (0, 1), (1, 2)]


@pytest.mark.parametrize("sent", [np.zeros(3), np.zeros(2, np.float32)])
def test_a_message_of_another_kind_is_an_error(sent: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    transport = LocalFabric(1).transports[0]
    transport.send(sent, 0)
    with pytest.raises(ArgumentError, match=f"expected 2 elements of float64 .* sent {sent.size} of {sent.dtype}"):
        transport.recv(np.zeros(2), 0)


# Letters


def test_letters_arrive_in_order() -> None:
    def on_rank(transport: LocalTransport) -> list[tuple[int, bytes]]:
        if transport.rank:
            for count in range(50):
                transport.post(b"%d" % count, 0)
            return []
        letters = [transport.wait_message(TIMEOUT) for _ in range(100)]
        assert transport.poll() is None
        return [letter for letter in letters if letter is not None]

    letters = LocalFabric(3).run(on_rank, TIMEOUT)[0]
    for source in (1, 2):
        assert [text for sender, text in letters if sender == source] == [b"%d" % count for count in range(50)]


def test_poll_does_not_wait_nor_see_messages() -> None:
    transport = LocalFabric(1).transports[0]
    assert transport.poll() is None
    transport.send(number(1), 0)
    assert transport.poll() is None
    transport.post(b"hello", 0)
    assert transport.poll() == (0, b"hello")
    assert received(transport, 0) == 1


# Groups


def test_duplicates_do_not_mix() -> None:
    def on_rank(transport: LocalTransport) -> list[float]:
        groups = [transport, transport.duplicate(), transport.duplicate()]
        groups.append(groups[1].duplicate())
        groups.append(transport.subgroup([0, 1]))
        if transport.rank == 0:
            for value, group in enumerate(groups):
                group.send(number(value), 1)
                group.post(b"%d" % value, 1)
            return []
        values = [received(group, 0) for group in reversed(groups)]
        assert [group.wait_message(TIMEOUT) for group in groups] == [(0, b"%d" % value) for value in range(5)]
        return values

    assert LocalFabric(2).run(on_rank, TIMEOUT)[1] == [4, 3, 2, 1, 0]


def test_subgroups_count_their_ranks_from_zero() -> None:
    def on_rank(transport: LocalTransport) -> tuple[int, int, float]:
        group = transport.subgroup([1, 3, 4] if transport.rank in (1, 3, 4) else [0, 2])
        left = number(-1)
        group.sendrecv(number(transport.rank), (group.rank + 1) % group.size, left, (group.rank - 1) % group.size)
        return group.rank, group.size, left[0]

    expected = [(0, 2, 2), (0, 3, 4), (1, 2, 0), (1, 3, 1), (2, 3, 3)]
    assert LocalFabric(5).run(on_rank, TIMEOUT) == expected


def test_subgroup_of_a_subgroup() -> None:
    def on_rank(transport: LocalTransport) -> float | None:
        if transport.rank == 0:
            return None
        outer = transport.subgroup([1, 2, 3])
        if outer.rank == 0:
            return None
        inner = outer.subgroup([1, 2])  # ranks 2 and 3 of the fabric
        inner.send(number(transport.rank), 1 - inner.rank)
        return received(inner, 1 - inner.rank)

    assert LocalFabric(4).run(on_rank, TIMEOUT) == [None, None, 3, 2]


@pytest.mark.parametrize("members", [[], [1, 2], [2, 0], [0, 0], [0, 3], [-1, 0]])
def test_bad_subgroups(members: list[int]) -> None:
    with pytest.raises(ArgumentError, match="sorted ranks below 3"):
        LocalFabric(3).transports[0].subgroup(members)


# Failures


def test_run_raises_the_first_error_and_wakes_the_others() -> None:
    seen: list[PeerLeftError] = []

    def on_rank(transport: LocalTransport) -> None:
        if transport.rank == 2:
            raise KeyError("broken")
        try:
            received(transport.duplicate() if transport.rank == 1 else transport, 2)
        except PeerLeftError as error:
            seen.append(error)
            raise

    with pytest.raises(KeyError, match="broken"):
        LocalFabric(4).run(on_rank, TIMEOUT)
    assert len(seen) == 3
    assert all("Rank 2 left" in str(error) and "KeyError: 'broken'" in str(error) for error in seen)
    assert all(isinstance(error.__cause__, KeyError) for error in seen)


def test_abort_reaches_who_comes_later() -> None:
    fabric = LocalFabric(2)
    first, second = fabric.transports
    second.send(number(5), 0)
    second.post(b"bye", 0)
    fabric.abort(1, ValueError("full"))
    fabric.abort(0, ValueError("not the first cause"))
    assert received(first, 1) == 5, "what was sent before still arrives"
    assert first.poll() == (1, b"bye")
    for _ in range(2):
        with pytest.raises(PeerLeftError, match=r"Rank 1 left .* waited for rank 1.*full"):
            received(first, 1)
        with pytest.raises(PeerLeftError, match="waited for a control message"):
            first.poll()
        with pytest.raises(PeerLeftError, match="sent to rank 1"):
            first.send(number(0), 1)
        with pytest.raises(PeerLeftError, match="sent to rank 1"):
            first.post(b"", 1)
        with pytest.raises(PeerLeftError, match="waited for rank 1"):
            received(first.duplicate(), 1)


def test_run_gives_up_in_time() -> None:
    woken: queue.SimpleQueue[int] = queue.SimpleQueue()

    def on_rank(transport: LocalTransport) -> None:
        if transport.rank:
            try:
                received(transport, 0)  # rank 0 never sends
            finally:
                woken.put(transport.rank)

    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] of 3"):
        LocalFabric(3).run(on_rank, timeout=0.1)
    assert time.monotonic() - begin < TIMEOUT / 2
    assert {woken.get(timeout=TIMEOUT) for _ in range(2)} == {1, 2}, "no thread is left behind"


# Virtual time: α = 1 s, and 8 bytes (one number) take 8 s, unless said otherwise

SLOW = Network(latency=1.0, bandwidth=1.0)


def test_a_message_occupies_both_ends() -> None:
    def on_rank(transport: LocalTransport) -> float:
        if transport.rank == 0:
            transport.send(number(0), 1)
        else:
            received(transport, 0)
        return transport.clock

    fabric = LocalFabric(2, SLOW)
    assert fabric.run(on_rank, TIMEOUT) == [8, 9]
    assert fabric.elapsed() == 9


def test_a_late_receiver_does_not_wait_for_the_latency() -> None:
    def on_rank(transport: LocalTransport) -> float:
        if transport.rank == 0:
            transport.send(number(0), 1)
        else:
            transport.charge(100)
            received(transport, 0)
        return transport.clock

    assert LocalFabric(2, SLOW).run(on_rank, TIMEOUT) == [8, 108]


def test_one_message_at_a_time_comes_in() -> None:
    def on_rank(transport: LocalTransport) -> float:
        if transport.rank:
            transport.send(number(0), 0)
        else:
            for source in (1, 2, 3):
                received(transport, source)
        return transport.clock

    assert LocalFabric(4, SLOW).run(on_rank, TIMEOUT) == [1 + 3 * 8, 8, 8, 8]


def test_sendrecv_goes_both_ways_at_once() -> None:
    def on_rank(transport: LocalTransport) -> float:
        transport.charge(5 * transport.rank)  # rank 1 is 5 s late
        sent = np.zeros(2 if transport.rank == 0 else 1)
        transport.sendrecv(sent, 1 - transport.rank, np.zeros(3 - sent.size), 1 - transport.rank)
        return transport.clock

    # Rank 0 is sending 16 bytes until 16, and has its 8 bytes at 5 + 1 + 8. Rank 1 can take in its
    # 16 bytes from 5 on, when it is there: until 21.
    assert LocalFabric(2, SLOW).run(on_rank, TIMEOUT) == [16, 21]


def test_reductions_are_charged() -> None:
    fabric = LocalFabric(1, Network(reduce_bandwidth=2.0))
    transport = fabric.transports[0]
    data = np.arange(3.0)
    transport.timed(numpy_combine(ReduceOp.SUM))(data, np.ones(3))
    np.testing.assert_array_equal(data, [1, 2, 3])
    assert fabric.elapsed() == 12


def test_ranks_of_one_host_have_their_own_network() -> None:
    def on_rank(transport: LocalTransport) -> float:
        if transport.rank == 0:
            transport.send(number(0), 1)
            transport.send(number(0), 2)
        else:
            received(transport, 0)
        return transport.clock

    fabric = LocalFabric(3, SLOW, hosts=[0, 0, 1], host_network=Network(latency=0.5, bandwidth=8.0))
    assert fabric.run(on_rank, TIMEOUT) == [1 + 8, 0.5 + 1, 1 + 1 + 8]
    assert fabric.transports[0].hosts == (0, 0, 1)
    assert fabric.transports[1].subgroup([1, 2]).hosts == (0, 1)


def test_clocks_do_not_depend_on_the_schedule() -> None:
    def elapsed() -> list[float]:
        def on_rank(transport: LocalTransport) -> float:
            rng = np.random.default_rng(0)  # the same messages on all ranks
            for _ in range(300):
                source, dest, length = rng.integers(8), rng.integers(8), rng.integers(50)
                if transport.rank == source:
                    transport.send(np.zeros(length), int(dest))
                if transport.rank == dest:
                    transport.recv(np.zeros(length), int(source))
            return transport.clock

        return LocalFabric(8, SLOW).run(on_rank, TIMEOUT)

    first = elapsed()
    assert len(set(first)) > 1
    assert all(elapsed() == first for _ in range(3))


def test_an_ideal_network_takes_no_time() -> None:
    fabric = LocalFabric(4)
    fabric.run(lambda transport: ring(transport, np.zeros(100), numpy_combine(ReduceOp.SUM)), TIMEOUT)
    assert fabric.elapsed() == 0


def test_traffic_is_counted() -> None:
    fabric = LocalFabric(2)
    transport = fabric.transports[0]
    transport.send(np.zeros(3), 1)
    transport.duplicate().send(np.zeros(5, np.int8), 1)
    transport.post(b"letter", 1)
    assert fabric.traffic(0) == Traffic(messages=2, bytes=29, control_messages=1)
    assert fabric.traffic(1) == Traffic(0, 0, 0)


def test_256_ranks() -> None:
    fabric = LocalFabric(256, Network(latency=1e-5, bandwidth=1e9))
    threading.stack_size(0)  # the system's default

    def on_rank(transport: LocalTransport) -> bool:
        data = np.full(300, float(transport.rank))
        ring(transport, data, numpy_combine(ReduceOp.SUM))
        return bool(np.all(data == 255 * 128))

    assert all(fabric.run(on_rank, TIMEOUT))
    assert sum(fabric.traffic(rank).messages for rank in range(256)) == 256 * 2 * 255
    assert threading.stack_size() == 0


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ArgumentError, match="at least 1 rank, not 0"):
        LocalFabric(0)
    with pytest.raises(ArgumentError, match="2 entries for 3 ranks"):
        LocalFabric(3, hosts=[0, 1])
    for wrong in ({"latency": -1.0}, {"bandwidth": 0.0}, {"reduce_bandwidth": -1.0}):
        with pytest.raises(ArgumentError, match="positive bandwidths"):
            Network(**wrong)
