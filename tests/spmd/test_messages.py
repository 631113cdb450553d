"""Messages with tags between two ranks, which do not block."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.api import world
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.protocols import ANY, LARGEST_TAG, Channel


@contextmanager
def opened() -> Iterator[Channel]:
    """A channel over all ranks."""
    here = world()
    channel = here.group().channel("a test")
    yield channel
    hvd.barrier()
    channel.close()


@pytest.mark.parametrize("count", [0, 1, 100_000])  # the last is more than MPI sends before it is asked for
@pytest.mark.parametrize("dtype", ["bool", "float16", "int64", "complex128"])
def test_around_a_ring(ranks: Any, count: int, dtype: str) -> None:
    def check() -> None:
        with opened() as channel:
            rank, size = channel.rank, channel.size  # of one rank: it sends to itself
            data = np.full(count, rank % 2 or 3, dtype)
            received = np.zeros(count, dtype)
            receive = channel.irecv(received, (rank - 1) % size)
            send = channel.isend(data, (rank + 1) % size)
            receive.wait()
            send.wait()
            np.testing.assert_array_equal(received, np.full(count, (rank - 1) % size % 2 or 3, dtype))
            assert receive.source == (rank - 1) % size
            assert send.source is None
            assert receive.test() and send.test()
            assert not receive.cancel() and not send.cancel()

    ranks(check)


def test_tags_are_received_in_any_order_and_messages_of_one_tag_in_theirs(ranks: Any) -> None:
    def check() -> None:
        with opened() as channel:
            numbers = np.arange(60, dtype=np.float64)
            for dest in range(channel.size):
                for n, number in enumerate(numbers):
                    channel.isend(number.reshape(1) + 100 * channel.rank, dest, n % 3 if n % 3 else LARGEST_TAG).wait()
            for source in reversed(range(channel.size)):
                for tag in (2, LARGEST_TAG, 1):
                    got = np.zeros(20)
                    requests = [channel.irecv(got[n : n + 1], source, tag) for n in range(20)]
                    for request in reversed(requests):
                        request.wait()
                    np.testing.assert_array_equal(got, numbers[tag % LARGEST_TAG :: 3] + 100 * source)

    ranks(check)


def test_a_server_learns_who_has_asked(ranks: Any) -> None:
    def check() -> None:
        with opened() as channel:
            asked = [channel.isend(np.array([float(channel.rank)]), 0, 7) for _ in range(3)]
            if channel.rank == 0:
                question = np.zeros(1)
                served = []
                for _ in range(3 * channel.size):
                    request = channel.irecv(question, ANY, 7)
                    request.wait()
                    assert request.source is not None
                    assert question[0] == request.source
                    served.append(request.source)
                    channel.isend(question + 0.5, request.source, 8).wait()
                assert sorted(served) == sorted(3 * list(range(channel.size)))
            for request in asked:
                request.wait()
                answer = np.zeros(1)
                channel.irecv(answer, 0, 8).wait()
                assert answer[0] == channel.rank + 0.5

    ranks(check)


def test_a_send_waits_for_no_receive_that_waits_for_it(ranks: Any) -> None:
    """All ranks send a large message first; nobody is in a call that another waits for."""

    def check() -> None:
        with opened() as channel:
            data = np.arange(2**18, dtype=np.float32)
            sends = [channel.isend(data * channel.rank, dest) for dest in range(channel.size)]
            for source in range(channel.size):
                got = np.empty_like(data)
                channel.irecv(got, source).wait()
                np.testing.assert_array_equal(got, data * source)
            for send in sends:
                send.wait()

    ranks(check)


def test_channels_and_other_messages_do_not_mix(ranks: Any) -> None:
    def check() -> None:
        with opened() as one, opened() as other:
            got, later = np.zeros(1), np.zeros(1)
            receive, second = one.irecv(got, one.rank), other.irecv(later, one.rank)
            other.isend(np.array([2.0]), one.rank).wait()
            second.wait()
            assert hvd.allreduce(np.ones(3), hvd.Sum).tolist() == [hvd.size()] * 3
            assert not receive.test()
            one.isend(np.array([1.0]), one.rank).wait()
            receive.wait()
            assert (got[0], later[0]) == (1.0, 2.0)
            transport = world()._transport.duplicate()
            tagged = transport.irecv(got, transport.rank, 1)
            transport.sendrecv(np.array([5.0]), transport.rank, later, transport.rank)
            transport.post(b"letter", transport.rank)
            assert not tagged.test() and later[0] == 5.0
            assert tagged.cancel()
            transport.close()

    ranks(check)


def test_a_receive_can_be_given_up(ranks: Any) -> None:
    def check() -> None:
        with opened() as channel:
            dropped, got = np.zeros(1), np.zeros(1)
            request = channel.irecv(dropped, channel.rank, 4)
            assert not request.test()
            assert request.cancel()
            assert request.test() and request.source is None
            request.wait()
            channel.isend(np.array([3.0]), channel.rank, 4).wait()
            channel.irecv(got, channel.rank, 4).wait()
            assert (dropped[0], got[0]) == (0.0, 3.0)

    ranks(check)


def test_a_dropped_request_goes_on_and_keeps_its_memory(ranks: Any) -> None:
    def check() -> None:
        with opened() as channel:
            channel.irecv(np.zeros(50_000), channel.rank, 1)
            gc.collect()
            for value in (1.0, 2.0):
                channel.isend(np.full(50_000, value), channel.rank, 1)
            gc.collect()
            got = np.zeros(50_000)
            channel.irecv(got, channel.rank, 1).wait()
            assert got.tolist() == [2.0] * 50_000

    ranks(check)


@pytest.mark.parametrize("sent", [1, 3, 5])
def test_a_message_of_another_size_is_an_error(ranks: Any, sent: int) -> None:
    def check() -> None:
        with opened() as channel:
            send = channel.isend(np.ones(sent), channel.rank)
            request = channel.irecv(np.zeros(4), channel.rank)
            with pytest.raises(ArgumentError, match=f"a message of rank {channel.rank} was to be "):
                request.wait()
            assert request.test()
            send.wait()

    ranks(check)


def test_arguments(ranks: Any) -> None:
    def check() -> None:
        with opened() as channel:
            fine, size = np.zeros(4), channel.size
            fixed = np.zeros(4)
            fixed.flags.writeable = False
            for call, words in (
                (lambda: channel.isend(fine, size), f"dest={size}: expected a rank of the group, 0 to {size - 1}"),
                (lambda: channel.isend(fine, ANY), "dest=-1"),
                (lambda: channel.irecv(fine, -2), "source=-2: .*or ANY"),
                (lambda: channel.isend(fine, 0, -1), "tag=-1"),
                (lambda: channel.irecv(fine, 0, LARGEST_TAG + 1), f"tag={LARGEST_TAG + 1}: .* 0 to {LARGEST_TAG}"),
                (lambda: channel.isend(fine[::2], 0), "C-contiguous"),
                (lambda: channel.isend(fine.reshape(2, 2), 0), r"shape \(2, 2\)"),
                (lambda: channel.irecv(fixed, 0), "writable"),
            ):
                with pytest.raises(ArgumentError, match=words):
                    call()
            channel.isend(fixed, channel.rank).wait()  # which is only read
            channel.irecv(fine, channel.rank).wait()

    ranks(check)


def test_a_closed_channel_takes_no_messages(ranks: Any) -> None:
    def check() -> None:
        with opened() as channel:
            request = channel.irecv(np.zeros(1), channel.rank)
        for call in (lambda: channel.isend(np.zeros(1), 0), request.test, request.wait):
            with pytest.raises(HvdliteError, match="this channel was closed"):
                call()

    ranks(check)
