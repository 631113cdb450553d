"""Servers in a thread of the test's process, and raw connections to them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

from hvdlite.serving.options import Options
from hvdlite.serving.server import Server

HEAD = b"POST /v1/predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@contextlib.contextmanager
def in_thread(predict: Any, **settings: Any) -> Iterator[Server]:
    """A server in a thread of this process, with a real port and real replicas."""
    server = Server(predict, Options(port=0, **settings))
    told = threading.Event()
    failures: list[Exception] = []

    def run() -> None:
        try:
            server.run(told.set)
        except Exception as error:
            failures.append(error)
            told.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert told.wait(60) and not failures, failures
        yield server
    finally:
        server.stop()
        thread.join(60)
        assert not thread.is_alive()
        assert server.pids == []


def connect(url: str) -> socket.socket:
    """Return a connection to a server."""
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def exchange(url: str, *pieces: bytes, end: bool = False) -> bytes:
    """Send pieces over a connection, and its end too if wanted, and return all that comes back until it ends."""
    with connect(url) as connection:
        for piece in pieces:
            connection.sendall(piece)
        if end:
            connection.shutdown(socket.SHUT_WR)
        received = b""
        while more := connection.recv(2**16):
            received += more
    return received
