"""Who owns the waits for messages: ranks that leave, that do not send, and servers that wait for whoever asks."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.api import world
from hvdlite.comm.local import LocalFabric, LocalTransport, Network
from hvdlite.comm.mailbox import LocalSend
from hvdlite.comm.ordered.channel import WatchedChannel
from hvdlite.config import Config
from hvdlite.errors import CommunicationError, HvdliteError, PeerLeftError
from hvdlite.protocols import ANY, Request, WaitKind
from hvdlite.testing import on_ranks
from hvdlite.watchdog.letters import Letter, Letters
from tests.support.jobs import PROGRAMS, mpirun


def open_channel() -> WatchedChannel:
    channel = world().group().channel("a test")
    assert isinstance(channel, WatchedChannel)
    return channel


def ended_by_close(request: Request) -> None:
    with pytest.raises(HvdliteError, match="this channel was closed"):
        request.wait()


# Who has come to the end waits until all others have left.
@pytest.mark.parametrize("kind", [kind for kind in WaitKind if kind is not WaitKind.END])
def test_a_wait_for_a_rank_that_left_says_so(kind: WaitKind) -> None:
    def check() -> str | None:
        channel = open_channel()
        if hvd.rank() != 1:
            return None
        request = channel.irecv(np.zeros(1), 2, 5)
        with pytest.raises(PeerLeftError) as raised, channel.guarded("an answer", kind):
            request.wait()
        got = np.zeros(1)
        channel.isend(np.ones(1), 1).wait()  # the others of the channel go on
        channel.irecv(got, 1).wait()
        assert got[0] == 1.0
        return str(raised.value)

    text = on_ranks(3, check)[1]
    assert text is not None
    assert "rank 2 has left the job, and this rank still waits for an answer." in text


def test_a_wait_for_any_rank_lasts_until_all_others_left() -> None:
    first_has_left = threading.Event()

    def check() -> list[float]:
        channel = open_channel()
        if hvd.rank() == 1:
            return []
        if hvd.rank() == 2:
            # Rank 0 knows that rank 1 has left when it fails to hear of it.
            done = np.zeros(1)
            channel.irecv(done, 0, 9).wait()
            channel.isend(np.array([2.0]), 0).wait()
            return []
        with pytest.raises(PeerLeftError, match="rank 1 has left"):
            channel.irecv(np.zeros(1), 1).wait()
        first_has_left.set()
        got = np.zeros(1)
        request = channel.irecv(got, ANY)
        channel.isend(np.zeros(1), 2, 9).wait()
        with channel.guarded("the next question", WaitKind.SERVICE):
            request.wait()
            served = [float(got[0])]
            with pytest.raises(PeerLeftError, match="still waits for the next question"):
                channel.irecv(got, ANY).wait()
        return served

    assert on_ranks(3, check)[0] == [2.0]
    assert first_has_left.is_set()


def test_a_message_that_never_comes_is_reported_and_given_up_on_all_ranks(caplog: pytest.LogCaptureFixture) -> None:
    over = threading.Event()

    def check() -> str:
        channel = open_channel()
        request = channel.irecv(np.zeros(1), 1 - hvd.rank(), 3)
        if hvd.rank() == 1:
            assert over.wait(20)  # which the report shows
        with pytest.raises(CommunicationError) as raised:
            request.wait()
        return str(raised.value)

    def with_end() -> str:
        try:
            return check()
        finally:
            over.set()

    settings = Config(stall_check_time_seconds=0.3, stall_shutdown_time_seconds=1.5)
    own, other = on_ranks(2, with_end, config=settings, timeout=30)
    assert "for a message with tag 3 from rank 1 to rank 0." in own
    assert "rank 1 is missing; it is here:" in own
    assert "assert over.wait(20)  # which the report shows" in own
    assert "the limit for one wait is 1.5 s" in own
    assert "rank 0 has given up" in other
    assert "has waited" in caplog.text


def test_a_report_knows_a_message_that_was_sent_and_not_received() -> None:
    """MPI's part in it fails: it says that the message has gone, and it never arrives."""
    over = threading.Event()

    def check() -> str:
        channel = open_channel()
        if hvd.rank() == 1:
            channel._transport.isend = lambda *_: LocalSend(lambda: None)  # type: ignore[method-assign]
            channel.isend(np.ones(1), 0, 3).wait()
            assert over.wait(20)
            return ""
        request = channel.irecv(np.zeros(1), 1, 3)
        try:
            with pytest.raises(CommunicationError) as raised:
                request.wait()
        finally:
            over.set()
        return str(raised.value)

    settings = Config(stall_check_time_seconds=0.3, stall_shutdown_time_seconds=1.5)
    told = on_ranks(2, check, config=settings, timeout=30)[0]
    assert (
        "rank 1 has done its part: the message was sent, and its receive was begun, but MPI has not carried it." in told
    )
    assert "assert over.wait(20)" in told
    assert "is missing" not in told


def test_what_is_known_of_a_message() -> None:
    link = (0, 1)
    sender, receiver = Letters(link, 0), Letters(link, 1)
    first, second = (sender.begin(0, 1, 5) for _ in range(2))
    assert first == Letter(link, 0, 1, 5, 0) and second == Letter(link, 0, 1, 5, 1)
    assert not receiver.did_its_part(first)
    awaited = receiver.begin(0, 1, 5)
    assert awaited == first
    assert receiver.did_its_part(first) and sender.did_its_part(awaited)
    assert not receiver.did_its_part(second)
    assert sender.begin(0, 0, 5) is None  # to itself
    receiver.cancelled(awaited)
    assert receiver.did_its_part(second) is None and receiver.begin(0, 1, 5) is None
    assert receiver.begin(0, 1, 6) is not None and receiver.begin(ANY, 1, 6) is None and receiver.begin(0, 1, 6) is None


def test_a_server_is_never_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Rank 1 asks when its own wait, which began together with the server's, has been reported."""

    def check() -> None:
        channel = open_channel()
        got = np.zeros(1)
        if hvd.rank() == 0:
            with channel.guarded("the next question", WaitKind.SERVICE):
                channel.irecv(got, ANY).wait()
            channel.isend(got, 1).wait()
            return
        request = channel.irecv(np.zeros(1), 0, 1)
        waiting = threading.Thread(target=ended_by_close, args=(request,))
        waiting.start()
        while "has waited" not in caplog.text:
            time.sleep(1e-3)
        channel.isend(np.ones(1), 0).wait()
        channel.irecv(got, 0).wait()
        assert "rank 1 has waited" in caplog.text
        assert "rank 0 waits for something else, the next question" in caplog.text
        assert "rank 0 has waited" not in caplog.text
        channel.close()
        waiting.join()

    on_ranks(2, check, config=Config(stall_check_time_seconds=0.3), timeout=30)


def test_a_wait_that_ends_with_another_thread_closing_the_channel() -> None:
    channels: list[WatchedChannel] = []
    begun = threading.Event()

    def close() -> None:
        assert begun.wait(20)
        channels[0].close()

    def check() -> None:
        channels.append(open_channel())
        request = channels[0].irecv(np.zeros(1), 0)
        closing = threading.Thread(target=close)
        closing.start()
        begun.set()
        ended_by_close(request)
        closing.join()

    on_ranks(1, check)


def test_a_server_on_mpi_ends_with_its_job() -> None:
    done = mpirun(3, str(PROGRAMS / "messages_of_a_rank_that_leaves.py"))
    assert done.returncode == 0, done.stderr
    assert "served [4.0, 4.0]; rank " in done.stdout
    assert "has left the job, and this rank still waits for the next question" in done.stdout


# The simulated network


def test_messages_of_one_rank_leave_and_arrive_one_after_the_other() -> None:
    """Two messages of 8 bytes from rank 1 and one from rank 2, α = 3 s, 1/β = 4 bytes/s: 2 s each."""

    def on_rank(transport: LocalTransport) -> float:
        if transport.rank:
            for request in [transport.isend(np.zeros(1), 0, tag) for tag in range(3 - transport.rank)]:
                request.wait()
        else:
            for request in [transport.irecv(np.zeros(1), s, t) for s, t in ((1, 0), (1, 1), (2, 0))]:
                request.wait()
        return transport.clock

    fabric = LocalFabric(3, Network(latency=3.0, bandwidth=4.0))
    assert fabric.run(on_rank, 20) == [9.0, 4.0, 2.0]  # 3 + 2, then 2 more each: the second has left at 2
    assert [fabric.traffic(rank) for rank in range(3)] == [(0, 0, 0), (2, 16, 0), (1, 8, 0)]


def test_a_wait_of_a_transport_ends_when_a_rank_fails() -> None:
    def on_rank(transport: LocalTransport) -> None:
        if transport.rank == 0:
            transport.irecv(np.zeros(1), 1).wait()
        raise ValueError("rank 1 fails")

    with pytest.raises(ValueError, match="rank 1 fails"):
        LocalFabric(2).run(on_rank, 20)
