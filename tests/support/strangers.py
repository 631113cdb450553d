"""Strangers at the port of an elastic job: ``scripts/faults --strangers --seed 1 --count 10000`` sends many.

An elastic training (tests/programs/elastic_counter.py) goes on meanwhile. It must take no notice: it ends well, each step is
counted once, and hvdliterun has no more memory and no more open files than before. Most strangers send a message that reports
a failure, and many make it with the job's own secret: if hvdliterun took a single one, the job would end.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import re
import selectors
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hvdlite.launcher_link.link import Address
from hvdlite.launcher_link.server import STRANGERS
from hvdlite.launcher_link.session import MAGIC, Message, Session
from tests.support.jobs import LIMIT, PROGRAMS, Started, wait_for

RANKS = 2
WARM = 200  # strangers after which hvdliterun has loaded and allocated what it needs for any
GREETING = len(MAGIC) + 32
LIE = Message("report", {"rank": 0, "text": "a stranger was believed", "code": 99})
GROWTH = 4 << 20
"""How many bytes of resident memory hvdliterun may gain. The training alone makes it gain 1.4 MiB in half a minute, in jumps.

So this finds what stays of ten thousand strangers, and not of a few. test_control.py counts the connections themselves."""


def greeting_and_lie(heard: bytes, secret: str) -> tuple[bytes, int]:
    """Return what a rank with this secret sends after this greeting of a launcher: its own greeting, whose length is returned
    too, and the lie."""
    rank, launcher = Session(secret, is_launcher=False), Session(secret, is_launcher=True)
    # It stands in for the launcher that was heard: a rank sends nothing before an answer.
    launcher._own = heard[len(MAGIC) :]
    launcher.outgoing.clear()
    rank.receive(heard)
    greeting = bytes(rank.outgoing)
    rank.outgoing.clear()
    launcher.receive(greeting)
    rank.receive(bytes(launcher.outgoing))
    rank.send(LIE)
    return greeting + bytes(rank.outgoing), len(greeting)


def _random_bytes(rng: random.Random, heard: bytes, secret: str) -> bytes:
    return rng.randbytes(rng.choice([1, 63, 64, 65, 1000, 100_000]))


def _lengths(rng: random.Random, heard: bytes, secret: str) -> bytes:
    return rng.randbytes(rng.choice([0, 64])) + struct.pack(">IQ", 2**32 - 1, 2**64 - 1) * 10


def _truncated(rng: random.Random, heard: bytes, secret: str) -> bytes:
    data, greeting = greeting_and_lie(heard, secret)
    return data[: rng.choice([rng.randrange(1, greeting), rng.randrange(greeting, len(data))])]


def _replayed(rng: random.Random, heard: bytes, secret: str) -> bytes:
    other = MAGIC + rng.randbytes(32)  # what the launcher has said in the connection that was recorded
    return greeting_and_lie(other, secret)[0]


def _reflected(rng: random.Random, heard: bytes, secret: str) -> bytes:
    return rng.choice([heard, heard[len(MAGIC) :] * 2])


def _wrong_secret(rng: random.Random, heard: bytes, secret: str) -> bytes:
    return greeting_and_lie(heard, rng.choice(["", secret[:-1], rng.randbytes(32).hex()]))[0]


def _changed(rng: random.Random, heard: bytes, secret: str) -> bytes:
    data = bytearray(greeting_and_lie(heard, secret)[0])
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _twice_the_message(rng: random.Random, heard: bytes, secret: str) -> bytes:
    """A right greeting, and then the message of another connection."""
    greeting = greeting_and_lie(heard, secret)
    other = greeting_and_lie(MAGIC + rng.randbytes(32), secret)
    return greeting[0][: greeting[1]] + other[0][other[1] :]


def _silent(rng: random.Random, heard: bytes, secret: str) -> bytes:
    return b""


KINDS: dict[str, Callable[[random.Random, bytes, str], bytes]] = {
    "random bytes": _random_bytes,
    "false lengths": _lengths,
    "truncated": _truncated,
    "replayed": _replayed,
    "sent back": _reflected,
    "wrong secret": _wrong_secret,
    "one bit changed": _changed,
    "another's message": _twice_the_message,
    "silent": _silent,
}


@dataclass(frozen=True)
class Usage:
    """What hvdliterun uses of the machine.

    Attributes:
        memory: Its resident memory, in bytes.
        files: Its open files, without those of /proc: it reads one now and then, to see whether a rank computes.
    """

    memory: int
    files: int

    def growth_since(self, before: Usage) -> list[str]:
        """Return, as texts, what is more now than it may be."""
        wrong = []
        if self.memory > before.memory + GROWTH:
            wrong.append(f"memory has grown from {before.memory} to {self.memory} bytes")
        if self.files > before.files:
            wrong.append(f"{self.files} files are open, and {before.files} were before")
        return wrong

    @classmethod
    def of(cls, pid: int) -> Usage:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        files = 0
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                files += not os.readlink(descriptor).startswith("/proc/")
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), files)


class Besieged:
    """An elastic training whose port strangers find.

    Args:
        folder: An empty folder.
        seed: The same seed gives the same strangers.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._end, self._rng = folder / "end", random.Random(seed)
        environ = {"COUNTER_FOLDER": str(folder), "COUNTER_UNTIL": str(self._end), "COUNTER_TELL": "1"}
        # What it prints goes to a file: the pipe would be full before anybody reads it.
        words = ["--min-np", str(RANKS), "--output-filename", str(folder), "--console-rank", "1", "--reset-limit", "0"]
        self.job = Started([*words, "python", str(PROGRAMS / "elastic_counter.py")], environ)
        self._printed = folder
        self.sent: collections.Counter[str] = collections.Counter()
        wait_for(lambda: self.steps > 0, LIMIT)
        self.address = self._find_address()

    def _find_address(self) -> Address:
        for pid in self.job.processes():
            with contextlib.suppress(OSError):
                found = re.search(rb"\0HVDLITE_CONTROL=([^\0]+)", Path(f"/proc/{pid}/environ").read_bytes())
                if found:
                    return Address.parse(found[1].decode())
        raise AssertionError("no process of the job knows its address")

    @property
    def steps(self) -> int:
        """How many steps the training has told."""
        return self._said.count("step ")

    @property
    def _said(self) -> str:
        return "".join(path.read_text() for path in self._printed.rglob("*") if "stdout" in path.name)

    @property
    def usage(self) -> Usage:
        return Usage.of(self.job.process.pid)

    def one_after_another(self, count: int) -> None:
        """Connect so many times. Each stranger leaves, or is hung up on, before the next one comes."""
        for _ in range(count):
            kind = self._rng.choice(list(KINDS))
            self.sent[kind] += 1
            with self._dial() as stream:
                heard = _receive(stream, GREETING)
                assert heard.startswith(MAGIC), heard
                with contextlib.suppress(OSError):  # hvdliterun has hung up before it read all
                    stream.sendall(KINDS[kind](self._rng, heard, self.address.secret))
                    stream.shutdown(socket.SHUT_WR)
                answer = _receive(stream, 1000)
                assert len(answer) in (0, 32), (kind, answer)  # 32: that the launcher knows the secret too

    @contextlib.contextmanager
    def at_once(self, count: int) -> Iterator[int]:
        """Return a context manager that holds so many connections open, and gives how many hvdliterun has kept."""
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
            for number in range(count):
                stream = stack.enter_context(self._dial())
                if number % 2:
                    with contextlib.suppress(ConnectionError):
                        stream.sendall(self._rng.randbytes(self._rng.randrange(1, 64)))
                selector.register(stream, selectors.EVENT_READ)
            deadline = time.monotonic() + LIMIT
            while len(selector.get_map()) > STRANGERS and time.monotonic() < deadline:
                for key, _ in selector.select(0.1):
                    if not _is_open(key.fileobj):
                        selector.unregister(key.fileobj)
            yield len(selector.get_map())

    def end(self) -> list[str]:
        """Let the training come to its end. Return all that was wrong, as texts."""
        self._end.touch()
        ended = self.job.end()
        found = re.search(r"(\d+) steps, counted \{(.*)\} times and (\d+) in all", self._said)
        wrong = [] if ended.code == 0 and not ended.err else [f"exit code {ended.code}: {ended.err[-1500:]}"]
        if found is None or found[1] != found[3] or "1" not in found[2] or "," in found[2]:
            wrong.append(f"steps that were not counted once: {found and found[0]}")
        return wrong

    def _dial(self) -> socket.socket:
        return socket.create_connection((self.address.host, self.address.port), timeout=LIMIT)


def _receive(stream: socket.socket, size: int) -> bytes:
    """Receive so many bytes, or those that come before the other end hangs up."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while len(data) < size and (more := stream.recv(size - len(data))):
            data += more
    return data


def _is_open(stream: object) -> bool:
    assert isinstance(stream, socket.socket)
    try:
        return bool(stream.recv(1000))
    except ConnectionError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.strangers", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="the same seed gives the same strangers")
    parser.add_argument("--count", type=int, required=True, help="how many come one after another")
    parser.add_argument("--at-once", type=int, default=800, help="how many connections are open at once (800)")
    options = parser.parse_args()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        besieged = Besieged(Path(folder), options.seed)
        try:
            besieged.one_after_another(WARM)
            before, begun = besieged.usage, time.monotonic()
            print(f"after {WARM} strangers: {_words(before)}", flush=True)
            for part in range(10):
                first, last = (options.count * each // 10 for each in (part, part + 1))
                besieged.one_after_another(last - first)
                seconds = time.monotonic() - begun
                print(f"{last}/{options.count} more, {_words(besieged.usage)}, {seconds:.0f} s", flush=True)
            wrong += besieged.usage.growth_since(before)
            for _ in range(3):
                with besieged.at_once(options.at_once) as kept:
                    print(f"{options.at_once} open at once: {kept} kept, {_words(besieged.usage)}", flush=True)
            wait_for(lambda: besieged.usage.files <= before.files, LIMIT)
            wrong += besieged.usage.growth_since(before)
            print(f"in the end: {_words(besieged.usage)}, {besieged.steps} steps of the training")
        finally:
            wrong += besieged.end()
    print(", ".join(f"{count} {kind}" for kind, count in sorted(besieged.sent.items())))
    sys.stdout.write("".join(f"{text}\n" for text in wrong) or "the training has taken no notice\n")
    return 1 if wrong else 0


def _words(usage: Usage) -> str:
    return f"{usage.memory / 2**20:.2f} MiB, {usage.files} files"


if __name__ == "__main__":
    sys.exit(main())
