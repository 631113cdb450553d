"""The line between ranks and launcher: what strangers send neither ends a job nor is it believed."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.launcher_link import server as server_module
from hvdlite.launcher_link.link import Address, connect, report_failure, request
from hvdlite.launcher_link.server import STRANGERS, ControlConnection, ControlServer
from hvdlite.launcher_link.session import MAGIC, Message, ProtocolError, Session, clip
from tests.support.jobs import LIMIT, PROGRAMS, Start, wait_for
from tests.support.strangers import GREETING, KINDS, LIE, WARM, Besieged, greeting_and_lie

SECRET = "the secret of this job"
HELLO = {"rank": 0, "host": "h", "pid": 1, "guard": 1, "threads": 1}
SENT = [
    Message("output", {"stream": "stdout"}, b"pay\nload"),
    Message("continued", {}),
    Message("result", {"rank": 1, "ok": True}, bytes(100_000)),
]


def move(sender: Session, receiver: Session) -> list[Message]:
    data = bytes(sender.outgoing)
    sender.outgoing.clear()
    return receiver.receive(data)


def pair(secret: str = SECRET) -> tuple[Session, Session]:
    """The ends of a connection whose greeting is over: the launcher's and the rank's."""
    launcher, rank = Session(SECRET, is_launcher=True), Session(secret, is_launcher=False)
    for sender, receiver in ((launcher, rank), (rank, launcher), (launcher, rank)):
        assert move(sender, receiver) == []
    assert launcher.is_trusted and rank.is_trusted
    return launcher, rank


# ---- sessions, without sockets ----


def test_messages_arrive_in_pieces_and_together() -> None:
    launcher, rank = pair()
    for message in SENT:
        rank.send(message)
    data = bytes(rank.outgoing)
    assert [m for start in range(0, len(data), 7) for m in launcher.receive(data[start : start + 7])] == SENT
    launcher.send(Message("end", {"grace": 1.5}))
    launcher.send(Message("ok", {}))
    assert move(launcher, rank) == [Message("end", {"grace": 1.5}), Message("ok", {})]


def test_who_does_not_know_the_secret_is_not_believed() -> None:
    with pytest.raises(ProtocolError, match="outside this job"):
        pair(secret="a guess")
    launcher, rank = Session("another", is_launcher=True), Session(SECRET, is_launcher=False)
    move(launcher, rank)
    launcher.outgoing += bytes(32)
    with pytest.raises(ProtocolError, match="not the launcher of this job"):
        move(launcher, rank)
    with pytest.raises(ProtocolError, match="no launcher of this version"):
        Session(SECRET, is_launcher=False).receive(b"HTTP/1.1 400 Bad Request\r\nServer: other than ours\r\n")


def test_the_secret_never_travels_nor_does_a_greeting_twice() -> None:
    launcher, rank = Session(SECRET, is_launcher=True), Session(SECRET, is_launcher=False)
    heard = bytes(launcher.outgoing)
    move(launcher, rank)
    greeting = bytes(rank.outgoing)
    move(rank, launcher)
    heard += greeting + bytes(launcher.outgoing)
    assert SECRET.encode() not in heard
    with pytest.raises(ProtocolError):  # what a listener has recorded opens no other connection
        Session(SECRET, is_launcher=True).receive(greeting)


def test_messages_cannot_be_repeated_left_out_swapped_or_sent_back() -> None:
    frames = []
    launcher, rank = pair()
    for message in SENT[:2]:
        rank.send(message)
        frames.append(bytes(rank.outgoing))
        rank.outgoing.clear()
    rank.send(SENT[1])
    last = bytes(rank.outgoing)
    for bad in ([frames[0], frames[0]], [frames[1]], [frames[0], last], [frames[1], frames[0]]):
        launcher, rank = pair()
        rank.send(SENT[0])  # these are the same messages under the keys of another connection
        with pytest.raises(ProtocolError, match="changed, repeated or left out"):
            launcher.receive(b"".join(bad))
    launcher, rank = pair()
    rank.send(SENT[1])
    with pytest.raises(ProtocolError):
        rank.receive(bytes(rank.outgoing))


def test_repeated_in_its_own_connection() -> None:
    launcher, rank = pair()
    rank.send(SENT[0])
    frame = bytes(rank.outgoing)
    assert launcher.receive(frame) == [SENT[0]]
    with pytest.raises(ProtocolError, match="repeated"):
        launcher.receive(frame)


def test_lengths_of_strangers_are_not_believed() -> None:
    stranger = Session(SECRET, is_launcher=True)
    assert stranger.receive_limit == 64
    stranger.receive(bytes(40))
    assert stranger.receive_limit == 24
    launcher, rank = pair()
    rank.send(SENT[1])
    frame = bytearray(rank.outgoing)
    frame[:12] = struct.pack(">IQ", 10, 10**15)
    with pytest.raises(ProtocolError):
        launcher.receive(bytes(frame))
    with pytest.raises(ProtocolError, match="header of"):
        pair()[0].receive(struct.pack(">IQ", 1 << 30, 0) + bytes(64))


@pytest.mark.parametrize(
    "message",
    [
        Message("gone", {}),  # the launcher's own word for a connection that ended
        Message("hello", {"rank": 0}),
        Message("hello", {**HELLO, "rank": "0"}),
        Message("hello", {**HELLO, "more": 1}),
        Message("report", {"rank": 0, "text": None, "code": 1}),
    ],
)
def test_fields_are_checked(message: Message) -> None:
    launcher, rank = pair()
    rank.send(message)
    with pytest.raises(ProtocolError):
        move(rank, launcher)


def test_very_long_texts_keep_both_ends() -> None:
    assert clip("short") == "short"
    clipped = clip("a" * 10**6 + "b" * 10**7)
    assert clipped.startswith("aaa") and clipped.endswith("bbb") and len(clipped) < 1_100_000


FRAMES = int(os.environ.get("HVDLITE_FUZZ_FRAMES", "100000"))
_BATCH = 100
_chunks = st.lists(
    st.one_of(
        st.binary(max_size=200),
        st.builds(
            lambda head, body, rest: struct.pack(">IQ", head, body) + rest,
            st.integers(0, 2**32 - 1),
            st.integers(0, 2**64 - 1),
            st.binary(max_size=120),
        ),
        st.builds(
            lambda value: json.dumps(value).encode() + b"\n", st.dictionaries(st.text(max_size=5), st.integers())
        ),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=FRAMES // _BATCH, database=None)
@given(_chunks, st.integers(0, 2**32))
def test_fuzz(chunks: list[bytes], seed: int) -> None:
    """Each example is a batch: a hundred greetings, right ones with something changed and such as no rank sends.

    Whatever comes, a stranger is not trusted, gets no message through, and the only error is ProtocolError.
    """
    rng = random.Random(seed)
    launcher, rank = Session(SECRET, is_launcher=True), Session(SECRET, is_launcher=False)
    move(launcher, rank)
    greeting = bytes(rank.outgoing)
    for number in range(_BATCH):
        data = bytearray(b"".join(chunks) if number % 2 else greeting)
        for _ in range(rng.randint(1, 4)):
            if data:
                data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        victim = Session(SECRET, is_launcher=bool(number % 4))
        with contextlib.suppress(ProtocolError):
            assert victim.receive(bytes(data)) == []
        assert not victim.is_trusted


@settings(max_examples=200, database=None)
@given(st.data())
def test_fuzz_of_a_trusted_connection(data: st.DataObject) -> None:
    """Whatever happens to the bytes after the greeting, only what was sent comes out, in order and from the start."""
    launcher, rank = pair()
    for message in SENT[:2]:
        rank.send(message)
    wire = bytearray(rank.outgoing)
    place = data.draw(st.integers(0, len(wire) - 1))
    change = data.draw(st.sampled_from(["flip", "cut", "insert"]))
    if change == "flip":
        wire[place] ^= data.draw(st.integers(1, 255))
    elif change == "cut":
        del wire[place : place + data.draw(st.integers(1, 50))]
    else:
        wire[place:place] = data.draw(st.binary(min_size=1, max_size=50))
    got: list[Message] = []
    with contextlib.suppress(ProtocolError):
        for byte in wire:
            got += launcher.receive(bytes([byte]))
    assert got == SENT[: len(got)]


# ---- the server, with sockets of this machine ----


BIG = 1
"""The rank that gets a function that no socket takes at once."""


class Served:
    """A server that a thread polls, and what was said to it."""

    def __init__(self) -> None:
        self.server = ControlServer("127.0.0.1")
        self.heard: list[Message] = []
        self._stop = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    @property
    def address(self) -> Address:
        return self.server.address

    def dial(self) -> socket.socket:
        return socket.create_connection((self.address.host, self.address.port), timeout=5)

    def is_well(self) -> bool:
        """Whether a rank of the job gets an answer."""
        return request(self.address, Message("fetch", {"rank": 0}), 5.0).payload == b"function"

    def close(self) -> None:
        self._stop = True
        self._thread.join(10)
        self.server.close()

    def _serve(self) -> None:
        while not self._stop:
            for connection, message in self.server.poll(0.02)[0]:
                self.heard.append(message)
                if message.kind == "fetch":
                    connection.send("function", bytes(1 << 26) if message.fields["rank"] == BIG else b"function")


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served()
    yield found
    found.close()


def hung_up(stream: socket.socket) -> bool:
    """Whether the other end closes the connection, after its greeting."""
    with contextlib.suppress(ConnectionResetError):
        while data := stream.recv(1000):
            assert data.startswith(MAGIC)
    return True


@pytest.mark.parametrize(
    "attack",
    [
        os.urandom(5000),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10,
        b"[" * 100_000 + b"\n",
        json.dumps({"kind": "hello", "size": 0, "token": "\u00e9"}).encode() + b"\n" + bytes(100),
        struct.pack(">IQ", 2**32 - 1, 2**64 - 1) + bytes(1 << 20),
        b"\n" * 1000,
    ],
    ids=["random", "http", "nested", "token", "huge", "newlines"],
)
def test_what_strangers_send(served: Served, attack: bytes) -> None:
    for _ in range(20):
        with served.dial() as stranger, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            stranger.sendall(attack)
            assert hung_up(stranger)
    assert served.is_well()
    assert {message.kind for message in served.heard} <= {"fetch", "gone"}


def test_nothing_stays_of_strangers(served: Served) -> None:
    """Counts what a connection consists of, with no regard to the collector of cyclic garbage."""

    def count() -> int:
        return sum(isinstance(each, (ControlConnection, Session, socket.socket)) for each in gc.get_objects())

    rng = random.Random(5)
    gc.collect()
    gc.disable()  # so each must go by itself, at once
    try:
        before = count()
        for number in range(300):
            kind = list(KINDS)[number % len(KINDS)]
            with served.dial() as stranger, contextlib.suppress(OSError):
                stranger.sendall(KINDS[kind](rng, stranger.recv(GREETING, socket.MSG_WAITALL), served.address.secret))
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(1000):
                    pass
        del stranger
        # The loop of `Served` holds the last connection that was trusted: it, its session and its socket.
        wait_for(lambda: count() <= before + 3, LIMIT)
    finally:
        gc.enable()
    assert {message.kind for message in served.heard} <= {"gone"}


def test_strangers_that_stay_give_way(served: Served) -> None:
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(served.dial()) for _ in range(2 * STRANGERS)]
        assert hung_up(idle[0])
        assert served.is_well()
        assert len(served.server._strangers) <= STRANGERS


def test_strangers_do_not_stay_for_long(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with served.dial() as idle:
        monkeypatch.setattr(server_module, "STRANGER_SECONDS", 0.1)
        assert hung_up(idle)
    assert served.is_well()


def test_no_file_left_for_a_connection(served: Served) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    own = len(os.listdir("/proc/self/fd"))
    streams: list[socket.socket] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (own + 40, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                streams.append(served.dial())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for stream in streams:
        stream.close()
    assert streams and served.is_well()


def test_resets(served: Served) -> None:
    for _ in range(300):
        with served.dial() as stream:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert served.is_well()


def test_a_rank_that_does_not_read_keeps_nobody_waiting(served: Served) -> None:
    lazy = connect(served.address)
    lazy.send("fetch", rank=BIG)
    wait_for(lambda: served.heard != [], LIMIT)
    assert served.is_well()
    lazy.close()


def test_no_launcher_no_report(served: Served) -> None:
    assert not report_failure("", 0, "text", 1)
    assert not report_failure("127.0.0.1:1:secret", 0, "text", 1)
    for garbage in ("garbage", "a:b:c", "h:99999999:s", ":::", "h:1:"):
        assert not report_failure(garbage, 0, "text", 1)
    assert Address.parse("::1:80:t") == Address("::1", 80, "t")
    assert SECRET not in repr(Address("h", 1, SECRET))


def test_another_jobs_secret(served: Served) -> None:
    own = served.address
    with pytest.raises(OSError):
        connect(Address(own.host, own.port, "another"), seconds=0.3)
    assert served.is_well()


def test_an_impostor_gets_nothing() -> None:
    """Who listens in the launcher's place learns no secret, and nothing of it is unpickled."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        heard = bytearray()

        def listen() -> None:
            stream, _ = impostor.accept()
            with stream:
                stream.sendall(MAGIC + bytes(32))
                heard.extend(stream.recv(1000))
                stream.sendall(bytes(32))
                heard.extend(stream.recv(1000))

        thread = threading.Thread(target=listen)
        thread.start()
        address = Address(*impostor.getsockname(), SECRET)
        with pytest.raises(ProtocolError, match="not the launcher of this job"):
            request(address, Message("fetch", {"rank": 0}), 5.0)
        thread.join(10)
    assert len(heard) == 64 and SECRET.encode() not in heard


def test_what_leaves_last_is_read(served: Served) -> None:
    """A close while words of the launcher are unread would throw away what the rank said last."""
    rank = connect(served.address)
    rank.send("fetch", rank=0)
    for _ in range(50):
        rank.send("output", bytes(1 << 16), stream="stdout")
    rank.finish()
    assert sum(message.kind == "output" for message in served.heard) == 50


# ---- a job ----


def test_strangers_do_not_end_a_job(start: Start, tmp_path: Path) -> None:
    job = start("-np", "2", str(PROGRAMS / "meet.py"), str(tmp_path / "go"))
    job.ready(2)
    ports = listening(job.process.pid)
    assert [address for address, _ in ports] == ["127.0.0.1"]
    with contextlib.ExitStack() as stack:
        for number in range(200):
            stream = stack.enter_context(socket.create_connection(ports[0], timeout=5))
            if number % 2:
                stream.sendall(b"[" * 1000)
        command = "\0".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in job.processes())
        assert "HVDLITE_CONTROL" not in command
        (tmp_path / "go").touch()
        assert job.end().code == 0


def test_an_elastic_job_takes_no_notice_of_strangers(tmp_path: Path) -> None:
    """`scripts/faults --strangers` sends ten thousand."""
    launcher = Session(SECRET, is_launcher=True)
    lie, _ = greeting_and_lie(bytes(launcher.outgoing[:GREETING]), SECRET)
    assert launcher.receive(lie) == [LIE]  # in the connection that it is made for, it would be believed
    besieged = Besieged(tmp_path, seed=3)
    try:
        besieged.one_after_another(WARM)
        before = besieged.usage
        besieged.one_after_another(1000)
        assert besieged.usage.growth_since(before) == []
        with besieged.at_once(3 * STRANGERS) as kept:
            assert kept <= STRANGERS
            assert besieged.usage.files <= before.files + STRANGERS
        steps = besieged.steps
        wait_for(lambda: besieged.steps > steps, LIMIT)
        wait_for(lambda: besieged.usage.files <= before.files, LIMIT)
    finally:
        wrong = besieged.end()
    assert wrong == []


def test_one_host_listens_on_loopback_only(start: Start, tmp_path: Path) -> None:
    job = start("-np", "2", str(PROGRAMS / "meet.py"), str(tmp_path / "go"))
    job.ready(2)
    # But for Open MPI's own prterun, which has no setting for that.
    names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in job.processes()}
    found = {pid: {address for address, _ in listening(pid)} for pid in names}
    assert found[job.process.pid] == {"127.0.0.1"}
    for pid, name in names.items():
        assert name in ("mpirun", "prterun") or found[pid] <= {"127.0.0.1"}, (name, found[pid])
    (tmp_path / "go").touch()
    assert job.end().code == 0


def listening(pid: int) -> list[tuple[str, int]]:
    """Where a process listens."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry).removeprefix("socket:[").rstrip("]"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                address, port = words[1].split(":")
                text = socket.inet_ntoa(struct.pack("<I", int(address, 16))) if table == "tcp" else address
                found.append((text, int(port, 16)))
    return found
