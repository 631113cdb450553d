"""The protocol between a rank and its launcher, without sockets: bytes go in, messages and bytes come out.

Both ends know the job's secret, which never travels. At the start each end proves that it knows the secret, by an HMAC over
two fresh random numbers. After that every message carries an HMAC that covers the message's number and direction, so nobody
can change, repeat, leave out or send back a message:

    launcher -> rank   MAGIC, a random number
    rank -> launcher   a random number, HMAC          (64 bytes at most are kept of a connection that is not authenticated yet)
    launcher -> rank   HMAC
    then, both ways    length of the header, length of the payload, HMAC, header (JSON), payload, HMAC of the payload if any

No header and no payload is parsed before its HMAC has been checked. The length of a header is used before that, so it is
limited to 16 MiB.

This file imports only the standard library: guards load it without the package, see `hvdlite.launch.worker.worker`.
"""

from __future__ import annotations

import hmac
import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MAGIC = b"hvdlite control 2\n"
_RANDOM = 32
_TAG = 32
_LENGTHS = struct.Struct(">IQ")
_COUNTER = struct.Struct(">Q")
_START = _LENGTHS.size + _TAG
_LONGEST_HEADER = 1 << 24
_LONGEST_TEXT = 1 << 20
_NUMBER = (int, float)

_FIELDS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    # rank -> launcher
    "hello": {"rank": int, "host": str, "pid": int, "guard": int, "threads": (int, type(None))},
    "output": {"stream": str},
    "mpi": {},
    "done": {"used": bool},
    "failed": {"text": str, "code": int, "error": str},
    "stopped": {"signal": int},
    "continued": {},
    "stack": {"text": str},
    "asked": {},
    "exit": {"status": int, "finished": bool, "trace": str, "time": _NUMBER},
    "report": {"rank": int, "text": str, "code": int},
    "hung": {"rank": int, "size": int, "text": str},
    "where": {"rank": int, "size": int},
    "fetch": {"rank": int},
    "result": {"rank": int, "ok": bool},
    "training": {"rank": int, "size": int, "dispensable": bool, "saves": bool},
    "saved": {"text": str},
    "elastic": {"rank": int, "size": int},
    "committed": {"call": int, "number": int},
    "leaving": {},
    "outlives": {"rank": int, "call": int},
    "again": {},
    "cannot": {"why": str},
    "together": {},
    "over": {},
    "pulse": {
        **dict.fromkeys(("rank", "step", "bytes", "memory"), int),
        **dict.fromkeys(("time", "stepped", "waited", "exchanged", "lasts"), _NUMBER),
        "what": str,
    },
    # rank -> rank
    "pair": {"to": str, "group": str, "rank": int},
    # launcher -> rank
    "end": {"grace": _NUMBER},
    "taken": {"stream": str, "bytes": int},
    "ok": {},
    "function": {},
    "stay": {},
    "drop": {},
    "lost": {"rank": int, "text": str},
    "save": {},
    "hosts": {"update": int},
    "show": {"stopped": bool},
    "generation": {"number": int, "ranks": list, "committed": list},
}
"""The fields of each kind of message, with their types."""


class ProtocolError(ConnectionError):
    """The other end does not know the job's secret, or does not speak this protocol."""


@dataclass(frozen=True)
class Message:
    """One control message.

    Attributes:
        kind: The kind of the message, such as "hello".
        fields: The fields that this kind has, by name.
        payload: More bytes, such as output of the rank; empty for most kinds.
    """

    kind: str
    fields: dict[str, Any]
    payload: bytes = b""

    def check(self) -> None:
        """Raise ProtocolError unless the message has the fields of its kind, each of its type."""
        expected = _FIELDS.get(self.kind)
        if expected is None or self.fields.keys() != expected.keys():
            raise ProtocolError(f"not a message of this protocol: {self.kind[:100]!r} with {sorted(self.fields)[:20]}")
        for name, kind in expected.items():
            if not isinstance(self.fields[name], kind):
                raise ProtocolError(f"{self.kind}: the field {name!r} is {type(self.fields[name]).__name__}")


def clip(text: str) -> str:
    """Shorten a text so that a message can carry it. Of more than 1 Mi characters, the beginning and the end stay."""
    if len(text) <= _LONGEST_TEXT:
        return text
    half = _LONGEST_TEXT // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters are left out ...\n{text[-half:]}"


class Session:
    """A `Session` is one end of one connection.

    Args:
        secret: The secret of the job.
        is_launcher: This is the launcher's end; otherwise it is the rank's end.

    Attributes:
        is_trusted: The other end has proved that it knows the secret.
        outgoing: The bytes to be sent. The owner of the session sends them, and removes them from here.
    """

    def __init__(self, secret: str, is_launcher: bool) -> None:
        self._secret = secret.encode()
        self._own = os.urandom(_RANDOM)
        self._is_launcher = is_launcher
        self._seal: _Authenticator | None = None
        self._open: _Authenticator | None = None
        self._incoming = bytearray()
        self._header: tuple[str, dict[str, Any], int] | None = None
        # Not bound to this session, which would keep itself alive until cyclic garbage is collected, once strangers have left.
        self._greet: Callable[[Session], None] = Session._meet_rank if is_launcher else Session._meet_launcher
        self._needed = _RANDOM + _TAG if is_launcher else len(MAGIC) + _RANDOM
        self._proof = b""
        self.is_trusted = False
        self.outgoing = bytearray(MAGIC + self._own if is_launcher else b"")

    @property
    def receive_limit(self) -> int:
        """The largest number of bytes to receive at once. Before the other end is trusted, it is the rest of the greeting."""
        return 1 << 18 if self.is_trusted else self._needed - len(self._incoming)

    def send(self, message: Message) -> None:
        """Add a message to `outgoing`. The other end must be trusted."""
        assert self._seal is not None
        header = json.dumps({**message.fields, "kind": message.kind}).encode()
        lengths = _LENGTHS.pack(len(header), len(message.payload))
        self.outgoing += lengths + self._seal.tag(lengths, header) + header
        if message.payload:
            self.outgoing += message.payload
            self.outgoing += self._seal.tag(message.payload)

    def receive(self, data: bytes) -> list[Message]:
        """Take bytes that were received, and return the messages that these bytes complete.

        Raises:
            ProtocolError: The other end does not know the secret, or breaks the protocol. Use the connection no more.
        """
        self._incoming += data
        while not self.is_trusted:
            if len(self._incoming) < self._needed:
                return []
            self._greet(self)
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    # ---- greeting ----

    def _meet_rank(self) -> None:
        other, proof = self._take(_RANDOM), self._take(_TAG)
        self._agree(self._own, other)
        if not hmac.compare_digest(proof, self._derive(b"rank", self._own, other)):
            raise ProtocolError("a connection from outside this job")
        self.outgoing += self._derive(b"launcher", self._own, other)
        self.is_trusted = True

    def _meet_launcher(self) -> None:
        if self._take(len(MAGIC)) != MAGIC:
            raise ProtocolError("what listens there is no launcher of this version of hvdlite")
        other = self._take(_RANDOM)
        self._agree(other, self._own)
        self.outgoing += self._own + self._derive(b"rank", other, self._own)
        self._proof = self._derive(b"launcher", other, self._own)
        self._needed, self._greet = _TAG, Session._confirm_launcher

    def _confirm_launcher(self) -> None:
        if not hmac.compare_digest(self._take(_TAG), self._proof):
            raise ProtocolError("what listens there is not the launcher of this job")
        self.is_trusted = True

    def _agree(self, launchers: bytes, ranks: bytes) -> None:
        keys = [self._derive(label, launchers, ranks) for label in (b"to rank", b"to launcher")]
        if not self._is_launcher:
            keys.reverse()
        self._seal, self._open = map(_Authenticator, keys)

    def _derive(self, label: bytes, launchers: bytes, ranks: bytes) -> bytes:
        return hmac.digest(self._secret, label + b"\0" + launchers + ranks, "sha256")

    # ---- messages ----

    def _next(self) -> Message | None:
        assert self._open is not None
        if self._header is None:
            if len(self._incoming) < _START:
                return None
            lengths = bytes(self._incoming[: _LENGTHS.size])
            header_size, payload_size = _LENGTHS.unpack(lengths)
            if header_size > _LONGEST_HEADER:
                raise ProtocolError(f"a header of {header_size} bytes")
            if len(self._incoming) < _START + header_size:
                return None
            del self._incoming[: _LENGTHS.size]
            tag, header = self._take(_TAG), self._take(header_size)
            self._open.check(tag, lengths, header)
            self._header = (*_read_header(header), payload_size)
        kind, fields, size = self._header
        if size and len(self._incoming) < size + _TAG:
            return None
        payload = self._take(size)
        if size:
            self._open.check(self._take(_TAG), payload)
        self._header = None
        message = Message(kind, fields, payload)
        message.check()
        return message

    def _take(self, size: int) -> bytes:
        with memoryview(self._incoming) as view:
            data = bytes(view[:size])
        del self._incoming[:size]
        return data


class _Authenticator:
    """Makes and checks the HMACs of one direction. Each covers its number, so nobody can repeat or leave out a message."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def tag(self, *parts: bytes) -> bytes:
        digest = hmac.new(self._key, _COUNTER.pack(self._count), "sha256")
        self._count += 1
        for part in parts:
            digest.update(part)
        return digest.digest()

    def check(self, tag: bytes, *parts: bytes) -> None:
        if not hmac.compare_digest(tag, self.tag(*parts)):
            raise ProtocolError("a message that was changed, repeated or left out on its way")


def _read_header(text: bytes) -> tuple[str, dict[str, Any]]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not a message of this protocol: {type(error).__name__}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("kind"), str):
        raise ProtocolError("not a message of this protocol: no kind")
    return fields.pop("kind"), fields
