"""Connections to real servers: clients that read slowly, that are idle, or that have gone."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from hvdlite.errors import ArgumentError
from hvdlite.serving.replicas.devices import devices_of
from tests.support.jobs import PYTHONPATH
from tests.support.servers import HEAD, connect, exchange, in_thread

ASKS = HEAD + b'accept: application/x-npy\r\ncontent-length: 14\r\n\r\n{"input": "q"}'
ASKS_ONCE = HEAD + b'connection: close\r\ncontent-length: 14\r\n\r\n{"input": "q"}'
SHOWN = ("HVDLITE_REPLICA", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
LARGE = 12_000_000  # more than the buffers of the system


def slow_connection(url: str) -> socket.socket:
    """A connection whose client's side takes little at a time."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    return connection


def metric(url: str, name: str) -> int:
    """The value of one of the server's metrics; 0 if it has none."""
    text = exchange(url, b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").decode()
    found = re.findall(rf"^hvdlite_serve_{re.escape(name)} (\d+)", text, re.MULTILINE)
    return int(found[0]) if found else 0


def test_a_client_that_reads_slowly_gets_its_whole_answer_and_one_that_does_not_read_is_ended() -> None:
    ended = 'connections_ended_total{reason="slow_reader"}'
    with in_thread(lambda batch: [np.zeros(LARGE, "u1") for _ in batch], keep_alive=0.05, read_timeout=0.6) as server:
        with slow_connection(server.url) as slow:
            slow.sendall(ASKS)
            received = slow.recv(4096)
            expected = received.index(b"\r\n\r\n") + 4 + int(re.findall(rb"content-length: (\d+)", received)[0])
            count = len(received)
            while count < expected:
                more = len(slow.recv(2**15))
                assert more, f"of {expected} bytes, {count} have come"
                count += more
                time.sleep(0.002)  # a slow link
            assert slow.recv(1) == b""  # it is closed when nothing has come for the keep-alive time
        assert metric(server.url, ended) == 0
        with slow_connection(server.url) as stuck:
            stuck.sendall(ASKS)
            while not metric(server.url, ended):
                time.sleep(0.01)
            count = 0
            with contextlib.suppress(ConnectionResetError):
                while more := len(stuck.recv(2**20)):
                    count += more
            assert count < expected


HEALTHY = [b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n" % path for path in (b"/healthz", b"/readyz")]
BEGUN = HEAD + b"expect: 100-continue\r\ncontent-length: 14\r\n\r\n"


def status(connection: socket.socket) -> int:
    """The status of the next answer on a connection."""
    return int(connection.recv(2**16).split()[1])


def test_whoever_asks_for_nothing_gives_way_and_health_is_always_answered() -> None:
    with in_thread(list, max_connections=4, max_wait=0.0) as server, contextlib.ExitStack() as stack:

        def connections(count: int, begin: bytes = b"") -> list[socket.socket]:
            found = [stack.enter_context(connect(server.url)) for _ in range(count)]
            for each in found:
                with contextlib.suppress(OSError):  # it may have given way already
                    each.sendall(begin)
            return found

        def check(expected: int) -> None:
            """Ask for an output, which has a status, and for the health, which is always answered."""
            (client,) = connections(1, ASKS_ONCE)
            assert status(client) == expected
            client.close()
            for request in HEALTHY:
                (client,) = connections(1, request)
                assert status(client) == 200
                client.close()

        idle = connections(20)
        check(200)
        assert idle[0].recv(1) == b""  # the first to come is the first to go
        slow = connections(20, HEAD[:20])
        check(200)
        for each in slow[-3:]:
            with contextlib.suppress(OSError):
                each.sendall(b"x")
        check(200)
        connections(8, HEALTHY[0])
        check(200)
        assert metric(server.url, 'connections_ended_total{reason="gave_way"}') >= 16 + 16
        busy: list[socket.socket] = []
        for _ in range(4):
            busy += connections(1, BEGUN)
            assert status(busy[-1]) == 100  # its header has been read: else it would give way to the next one
        check(429)
        for _ in range(5):
            connections(20)  # more than there are spare ones
            check(429)
        for each in busy:
            each.sendall(b'{"input": "q"}')
            assert status(each) == 200
        check(200)


def test_inputs_whose_clients_have_gone_are_not_computed(tmp_path: Path) -> None:
    """Neither of clients that have closed, nor of those that were reset. One that sends no more, but reads, gets its answer."""
    goes, begun = tmp_path / "go", tmp_path / "begun"

    def wait(batch: Any) -> Any:
        begun.touch()
        while not goes.exists():
            time.sleep(0.001)
        return batch

    with in_thread(wait, max_batch=1, max_wait=0.0) as server, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(server.url)) for _ in range(8)]
        clients[0].sendall(ASKS_ONCE)
        while not begun.exists():
            time.sleep(0.001)
        for client in clients[1:]:
            client.sendall(ASKS_ONCE)
        while metric(server.url, "queue_length") != 7:
            time.sleep(0.001)
        clients[1].shutdown(socket.SHUT_WR)
        for client in clients[2:5]:
            client.close()
        for client in clients[5:]:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        while metric(server.url, "queue_length") != 1:
            time.sleep(0.001)
        goes.touch()
        for client in clients[:2]:
            received = b""
            while more := client.recv(2**16):
                received += more
            assert received.endswith(b'{"output":"q"}')
        assert metric(server.url, "batch_size_sum") == 2
        assert metric(server.url, 'requests_total{status="499"}') == 6


def test_a_server_that_ends_says_so_first() -> None:
    """After SIGTERM, /readyz says 503 while all is served; then, or at a second signal, the port closes."""
    command = [sys.executable, "-m", "hvdlite", "serve", "tests.programs.servables:counted", "--port", "0"]
    command += ["--lame-duck", "60min", "--max-wait", "0"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": PYTHONPATH}
    ) as server:
        assert server.stderr
        try:
            lines = [server.stderr.readline()]
            while "Ready" not in lines[-1]:
                lines.append(server.stderr.readline())
                assert lines[-1], lines
            url = re.findall(r"http://\S+:\d+", lines[0])[0]
            with connect(url) as kept:
                kept.sendall(HEALTHY[1])
                assert status(kept) == 200
                server.send_signal(signal.SIGHUP)  # loads the model anew
                while "version 2 answers now" not in server.stderr.readline():
                    assert server.poll() is None
                server.send_signal(signal.SIGTERM)
                assert "/readyz says 503" in server.stderr.readline()
                kept.sendall(HEALTHY[1])
                assert status(kept) == 503 and kept.recv(1) == b""
            assert exchange(url, HEALTHY[1]).startswith(b"HTTP/1.1 503 ")
            assert exchange(url, HEALTHY[0]).startswith(b"HTTP/1.1 200 ")
            assert exchange(url, ASKS_ONCE.replace(b'"q"', b" 5 ")).endswith(b'{"output":5}')
            server.send_signal(signal.SIGINT)
            assert "The server ends when it has answered what is there" in server.stderr.readline()
            assert server.wait(30) == 0
        finally:
            server.kill()


def test_connections_that_are_over_need_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if nothing comes after them. The test looks for what uvicorn keeps of each request."""
    monkeypatch.setattr("hvdlite.serving.server._TIDY_EVERY", 0.05)
    monkeypatch.setattr("hvdlite.serving.server._TIDY_OBJECTS", 0)
    with in_thread(list, max_wait=0.0) as server:
        for _ in range(20):
            with connect(server.url) as connection:
                connection.sendall(
                    BEGUN.replace(b"expect: 100-continue\r\n", b"").replace(b" 14", b" 100000") + b"x" * 90_000
                )
        while metric(server.url, 'requests_total{status="499"}') < 20:
            time.sleep(0.001)
        while any(isinstance(each, RequestResponseCycle) for each in gc.get_objects()):
            time.sleep(0.01)


VISIBLE = {"CUDA_VISIBLE_DEVICES": "3, GPU-af,5"}


@pytest.mark.parametrize(
    ("asked", "replicas", "environ", "devices"),
    [
        ("auto", 2, VISIBLE, ["3", "GPU-af"]),
        ("auto", 2, {"CUDA_VISIBLE_DEVICES": ""}, ["", ""]),
        ("auto", 1, {"CUDA_VISIBLE_DEVICES": "3,-1,5"}, ["3"]),
        ("none", 2, VISIBLE, ["", ""]),
        ("2,0", 2, VISIBLE, ["5", "3"]),
        ("0,2", 3, VISIBLE, ["3", "5", "3"]),
        ("auto", 4, VISIBLE, "4 replicas, and 3 GPUs .*: give --devices 0,1,2,0 for several replicas on a GPU"),
        ("0,3", 2, VISIBLE, "there is no GPU 3; the numbers are 0 to 2"),
        ("0", 1, {"CUDA_VISIBLE_DEVICES": "-1"}, "there is no GPU 0; there is none"),
        ("0,1,2", 2, VISIBLE, "3 devices for 2 replicas, so some would have none to use them: give --replicas 3"),
        ("cuda:0", 2, VISIBLE, "expected auto, none, or numbers of GPUs such as 0,1"),
    ],
)
def test_devices_are_shared_out(asked: str, replicas: int, environ: dict[str, str], devices: list[str] | str) -> None:
    if isinstance(devices, str):
        with pytest.raises(ArgumentError, match=devices):
            devices_of(asked, replicas, environ)
    else:
        assert devices_of(asked, replicas, environ) == devices


def test_each_replica_has_its_number_its_device_and_its_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")

    def show(batch: Any) -> Any:
        return [[os.environ.get(name) for name in SHOWN] for _ in batch]

    found: dict[str, list[str]] = {}
    with (
        caplog.at_level("INFO"),
        in_thread(show, replicas=2, max_batch=1, max_wait=0.0, threads_per_replica=3) as server,
    ):
        while len(found) < 2:
            number, *others = json.loads(exchange(server.url, ASKS_ONCE).partition(b"\r\n\r\n")[2])["output"]
            found[number] = others
        assert metric(server.url, 'replica_device{device="6",replica="1"}') == 1
    assert found == {"0": ["4", "3"], "1": ["6", "3"]}
    assert "replica on GPU: 0 on 4, 1 on 6" in caplog.text
