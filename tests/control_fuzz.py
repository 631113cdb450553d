"""Strangers at the control port of a running elastic job: ``scripts/faults --control --seed 1 --count 10000`` sends many.

None of them may be answered, believed, or end the job, and hvdliterun's memory may not grow. Each knows a little more than the
one before: nothing, the greeting, what a real rank has sent, and in the end the secret, but not how to keep to the protocol.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from hvdlite.launcher_link.link import Address, request
from hvdlite.launcher_link.session import MAGIC, Message, Session
from tests.jobs import LIMIT, PROGRAMS, Started, wait_for

_GREETING = len(MAGIC) + 32
_LENGTHS = (
    12  # bytes at the start of a message. For a length that was changed to a larger one hvdliterun waits for more
)
_HELD = 200  # connections that stay open at a time: more than hvdliterun keeps
_ENDS_THE_JOB = Message("report", {"rank": 0, "text": "believed", "code": 7})
"""Who is believed once ends the job with this: its exit code tells."""


class Strangers:
    """Strangers that connect to a job, one after the other. The same seed gives the same ones.

    Args:
        address: Where the job's hvdliterun listens, and its secret.
        pid: The process id of that hvdliterun.
        seed: The seed.

    Attributes:
        wrong: All that was wrong, as texts.
        kinds: How many of each kind there were.
    """

    def __init__(self, address: Address, pid: int, seed: int) -> None:
        self.wrong: list[str] = []
        self.kinds: Counter[str] = Counter()
        self._address, self._pid, self._rng = address, pid, random.Random(seed)
        self._held: list[socket.socket] = []
        self._recorded = self._record()
        self._attacks: dict[str, Callable[[bytes], Iterator[bytes]]] = {
            "silent": lambda _: iter(()),
            "random": lambda _: iter([self._rng.randbytes(self._rng.randrange(64, 5000))]),
            "truncated": self._truncated,
            "replayed": lambda _: iter([self._recorded]),
            "guessed": lambda greeting: self._greeted("a guess", greeting),
            "changed": self._changed,
            "repeated": self._repeated,
            "huge": self._huge,
            "unknown": self._unknown,
        }

    def send(self, count: int) -> None:
        """Let so many strangers connect."""
        for kind in self._rng.choices(list(self._attacks), k=count):
            self.kinds[kind] += 1
            try:
                self._attack(kind)
            except OSError as error:  # ``TimeoutError`` too
                self.wrong.append(f"{kind}: {error!r}")

    def close(self) -> None:
        """Hang up the connections that are held."""
        for stream in self._held:
            stream.close()
        self._held.clear()

    def resident(self) -> float:
        """Return how much memory hvdliterun has, in MiB."""
        status = Path(f"/proc/{self._pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def _dial(self) -> tuple[socket.socket, bytes]:
        stream = socket.create_connection((self._address.host, self._address.port), timeout=10)
        greeting = b""
        while len(greeting) < _GREETING and (data := stream.recv(_GREETING - len(greeting))):
            greeting += data
        return stream, greeting

    def _attack(self, kind: str) -> None:
        stream, greeting = self._dial()
        knows_the_secret = kind in ("changed", "repeated", "huge", "unknown")
        answers = b""
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for data in self._attacks[kind](greeting):
                    stream.sendall(data)
                if kind in ("silent", "truncated"):  # nothing more comes of it: stay, hang up, or reset the connection
                    self._hold_or_leave(stream)
                    return
                while data := stream.recv(1000):
                    answers += data
        finally:
            if stream not in self._held:
                stream.close()
        if len(answers) > (32 if knows_the_secret else 0):  # the rest of the greeting
            self.wrong.append(f"{kind}: hvdliterun answered {len(answers)} bytes")

    def _hold_or_leave(self, stream: socket.socket) -> None:
        if len(self._held) < _HELD:
            self._held.append(stream)
        elif self._rng.random() < 0.5:
            self._held.pop(self._rng.randrange(_HELD)).close()
            self._held.append(stream)
        else:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    # ---- what strangers send ----

    def _record(self) -> bytes:
        """Be a rank that asks for something harmless, and return all that it sends."""
        stream, greeting = self._dial()
        with stream:
            sent = b""
            for data in self._greeted(self._address.secret, greeting, Message("fetch", {"rank": 0})):
                stream.sendall(data)
                sent += data
            assert stream.recv(1000)
        return sent

    def _greeted(self, secret: str, greeting: bytes, *messages: Message) -> Iterator[bytes]:
        """Greet as a rank does, and send messages without waiting for the launcher's proof."""
        session = Session(secret, is_launcher=False)
        session.receive(greeting)
        for message in messages or [_ENDS_THE_JOB]:
            session.send(message)
        yield bytes(session.outgoing)

    def _truncated(self, greeting: bytes) -> Iterator[bytes]:
        (whole,) = self._greeted(self._address.secret, greeting)
        yield whole[: self._rng.randrange(len(whole))]

    def _changed(self, greeting: bytes) -> Iterator[bytes]:
        (whole,) = self._greeted(self._address.secret, greeting)
        changed = bytearray(whole)
        changed[self._rng.randrange(64 + _LENGTHS, len(whole))] ^= self._rng.randrange(1, 256)
        yield bytes(changed)

    def _repeated(self, greeting: bytes) -> Iterator[bytes]:
        (whole,) = self._greeted(self._address.secret, greeting, Message("committed", {"call": 0, "number": 1}))
        yield whole + whole[64:]

    def _huge(self, greeting: bytes) -> Iterator[bytes]:
        (whole,) = self._greeted(self._address.secret, greeting)
        yield (
            whole[:64]
            + struct.pack(">IQ", self._rng.randrange(1 << 25, 1 << 32), self._rng.getrandbits(64))
            + bytes(64)
        )

    def _unknown(self, greeting: bytes) -> Iterator[bytes]:
        """Who knows the secret, and sends what no rank sends."""
        messages = [
            Message("no such kind", {}),
            Message("report", {"rank": "0"}),
            Message("report", {"rank": 10**9, "text": "", "code": 7}),
            Message("hello", {"rank": 0, "host": "x", "pid": 1, "guard": 1, "threads": 1}),
            Message("leaving", {}),
            Message("elastic", {"rank": 0, "size": 10**9}),
        ]
        yield from self._greeted(self._address.secret, greeting, self._rng.choice(messages))


def address_of(job: Started) -> Address:
    """Return where a running job listens, and its secret, from the environment of one of its processes."""
    for pid in job.processes():
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                name, _, value = entry.partition(b"=")
                if name == b"HVDLITE_CONTROL":
                    return Address.parse(value.decode())
    raise AssertionError("no process of the job knows its address")


def attack(folder: Path, seed: int, count: int, say: Callable[[str], None] = lambda _: None) -> list[str]:
    """Start an elastic job of two ranks, let strangers connect while it trains, and return all that was wrong, as texts."""
    end = folder / "end"
    environ = {"COUNTER_FOLDER": str(folder), "COUNTER_UNTIL": str(end), "COUNTER_TELL": "1"}
    job = Started(["-np", "2", "--min-np", "2", str(PROGRAMS / "elastic_counter.py")], environ)
    try:
        assert job.process.stdout is not None
        first = job.process.stdout.readline()
        drain = _Drain(job)
        assert "step 1 of 2 ranks" in first, first
        address = address_of(job)
        strangers = Strangers(address, job.process.pid, seed)
        with contextlib.closing(strangers):
            warm = max(count // 10, min(count, 2 * _HELD))  # the first ones fill what is then used again
            strangers.send(warm)
            before, begun = strangers.resident(), time.monotonic()
            for done in range(warm, count, 500):
                strangers.send(min(500, count - done))
                now = min(done + 500, count)
                seconds = (time.monotonic() - begun) / (now - warm) * (count - now)
                say(f"{now}/{count} strangers, {strangers.resident() - before:+.1f} MiB, {seconds:.0f} s left")
            grown = strangers.resident() - before
        wrong = strangers.wrong
        if grown > 4.0:
            wrong.append(f"hvdliterun has grown by {grown:.1f} MiB, from {before:.1f}")
        try:
            request(address, Message("fetch", {"rank": 0}), 10.0)
        except OSError as error:
            wrong.append(f"hvdliterun does not answer a rank any more: {error!r}")
        end.touch()
        code = job.process.wait(LIMIT)
        out, err = drain.texts()
        if code or err:
            wrong.append(f"exit code {code}: {err[-1000:]}")
        elif "times and" not in out[-1000:]:
            wrong.append(f"the training has not come to its end: {out[-300:]}")
        say(", ".join(f"{number} {kind}" for kind, number in sorted(strangers.kinds.items())))
        return wrong
    finally:
        job.process.kill()
        wait_for(lambda: not job.processes(), 10.0)


class _Drain:
    """Reads what a job prints, so that it need not wait for a reader."""

    def __init__(self, job: Started) -> None:
        self._texts = ["", ""]
        self._threads = [
            threading.Thread(target=self._read, args=(number, stream))
            for number, stream in enumerate((job.process.stdout, job.process.stderr))
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, number: int, stream: IO[str]) -> None:
        with stream:
            self._texts[number] = stream.read()

    def texts(self) -> list[str]:
        for thread in self._threads:
            thread.join()
        return self._texts


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/faults --control", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="the same seed gives the same strangers")
    parser.add_argument("--count", type=int, required=True, help="how many")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wrong = attack(Path(folder), options.seed, options.count, lambda text: print(text, flush=True))
    print("\n".join(wrong) if wrong else "none was answered or believed, and the training has come to its end")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
