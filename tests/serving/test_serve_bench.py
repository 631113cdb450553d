"""``hvdlite serve-bench`` counts and times what a server does that does as it is told."""

from __future__ import annotations

import asyncio
import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("httptools")

from hvdlite.errors import ArgumentError, LaunchError
from hvdlite.serving.bench import bodies, schedule
from hvdlite.serving.bench.bodies import Bodies
from hvdlite.serving.bench.client import target
from hvdlite.serving.bench.load import closed_loop, open_loop
from hvdlite.serving.bench.results import Results, table
from hvdlite.tools.cli import main

BODIES = Bodies("application/json", (b'{"input": 0}', b'{"input": 1}'))
Answer = Callable[[int, bytes], Awaitable[bytes | None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@contextmanager
def server(answer: Answer) -> Iterator[str]:
    """A server in a thread. It answers with what a function returns of a request's number and body; None: it hangs up."""
    started, port = threading.Event(), 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                body = await reader.readexactly(int(re.findall(r"content-length: (\d+)", head)[0]))
                numbers.append(len(numbers))
                data = await answer(numbers[-1], body)
                if data is None:
                    break
                writer.write(data)
                if b"connection: close" in data:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    numbers: list[int] = []
    loop = asyncio.new_event_loop()

    async def run() -> None:
        nonlocal port
        async with await asyncio.start_server(connected, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            started.set()
            await stop.wait()
            for task in asyncio.all_tasks() - {
                asyncio.current_task()
            }:  # from Python 3.12 on, the server's end waits for them
                task.cancel()
                await asyncio.wait([task])

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert started.wait(60)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def send_at(url: str, times: np.ndarray, connections: int = 100, timeout: float = 30.0) -> Results:
    return asyncio.run(open_loop(target(url, BODIES, {}), times, "load", connections, timeout, lambda line: None))


def test_every_request_is_sent_and_counted_by_what_came() -> None:
    seen = []

    async def answer(number: int, body: bytes) -> bytes | None:
        seen.append(body)
        if number % 10 == 3:
            return b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n"
        if number % 10 == 5:
            return None
        if number % 10 == 7:
            return b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"
        if number % 10 == 9:
            return b"nonsense\r\n\r\n"
        return OK

    with server(answer) as url:
        results = send_at(url, np.linspace(0, 0.2, 100))
    assert len(results.latencies) == 70
    assert results.failures[429] == 10 and results.failures["connection lost"] == 10
    assert results.failed == 30 and any(str(key).startswith("no HTTP") for key in results.failures)
    assert seen.count(BODIES.data[0]) == seen.count(BODIES.data[1]) == 50


def test_a_chunked_answer_that_comes_in_pieces_is_one_answer() -> None:
    async def answer(number: int, body: bytes) -> bytes:
        return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n1\r\n!\r\n0\r\n\r\n"

    with server(answer) as url:
        assert len(send_at(url, np.zeros(20), connections=2).latencies) == 20


def test_in_an_open_loop_a_stall_is_charged_to_all_that_were_due() -> None:
    """One connection, and the first answer takes 0.3 s: the requests that were due meanwhile wait for it."""

    async def answer(number: int, body: bytes) -> bytes:
        await asyncio.sleep(0.3 if number == 0 else 0)
        return OK

    due = np.linspace(0, 0.2, 11)
    with server(answer) as url:
        results = send_at(url, due, connections=1)
    assert (np.sort(results.latencies)[::-1] >= 0.29 - due).all()
    assert (np.array(results.lateness[1:]) >= 0.29 - due[1:]).all()
    assert any("too late" in note for note in results.notes())


def test_in_a_closed_loop_each_client_has_one_request_at_a_time() -> None:
    now, most = 0, 0

    async def answer(number: int, body: bytes) -> bytes:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(0.005)
        now -= 1
        return OK

    shown: list[str] = []
    with server(answer) as url:
        results = asyncio.run(closed_loop(target(url, BODIES, {}), 7, 1.2, 0.1, 30.0, shown.append))
    assert most == 7
    assert 0 < len(results.latencies) <= 7 * 1.3 / 0.005
    assert min(results.latencies) >= 0.004 and results.failed == 0
    assert len(shown) == 1 and shown[0].startswith("7 clients: 1 s, ")


def test_requests_without_an_answer_are_given_up() -> None:
    async def answer(number: int, body: bytes) -> bytes:
        await asyncio.sleep(1000 if number % 2 else 0)
        return OK

    with server(answer) as url:
        results = send_at(url, np.zeros(8), connections=1, timeout=0.2)
    assert results.failures["no answer in time"] + len(results.latencies) == 8
    assert results.failures["no answer in time"] >= 1


def test_no_server_is_an_error_at_once() -> None:
    async def answer(number: int, body: bytes) -> bytes:
        return OK

    with server(answer) as url:
        pass
    with pytest.raises(LaunchError, match="no server answers at http://127.0.0.1"):
        send_at(url, np.zeros(1))


def test_schedules(tmp_path: Path) -> None:
    times = schedule.poisson(1000, 20)
    assert len(times) == pytest.approx(20000, rel=0.05) and times[-1] <= 20
    gaps = np.diff(times)
    assert gaps.min() >= 0 and gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
    burst = schedule.poisson(1000, 20, burst=10).reshape(-1, 10)
    assert (burst == burst[:, :1]).all() and burst.size == pytest.approx(20000, rel=0.1)
    path = tmp_path / "trace.csv"
    path.write_text("# time, path\n100.5,/a\n\n100.75,/b\n102\n")
    assert schedule.trace(path).tolist() == [0, 0.25, 1.5]
    for text, words in {
        "1\n0.5": "line 2: 0.5 does not come after",
        "a": "line 1: 'a' is no time",
        "": "no time in it",
    }.items():
        path.write_text(text)
        with pytest.raises(ArgumentError, match=words):
            schedule.trace(path)


def test_bodies_are_what_numpy_and_json_read(tmp_path: Path) -> None:
    npy = bodies.random((3, 2), "float32", as_json=False)
    assert npy.kind == "application/x-npy" and len(set(npy.data)) == len(npy.data)
    array = np.load(io.BytesIO(npy.data[0]))
    assert array.shape == (3, 2) and array.dtype == np.float32
    assert np.shape(json.loads(bodies.random((3, 2), "int64", as_json=True).data[0])["input"]) == (3, 2)
    (tmp_path / "a.json").write_text("[1]")
    assert bodies.from_files([tmp_path / "a.json"], None) == Bodies("application/json", (b"[1]",))
    with pytest.raises(ArgumentError, match="expected files of one of the kinds"):
        bodies.from_files([tmp_path / "a.json", tmp_path / "b.npy"], None)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(number: int, body: bytes) -> bytes:
        return OK

    saved, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    with server(answer) as url:
        command = ["serve-bench", url, "--shape", "4", "--rate", "100,200", "--seconds", "0.3", "--save", str(saved)]
        assert main([*command, "--plot", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["load", "requests/s"] and [line.split()[0] for line in lines[1:3]] == [
        "100/s",
        "200/s",
    ]
    loads = json.loads(saved.read_text())["loads"]
    assert all(load["answered"] > 0 and load["failures"] == {} and load["p50"] <= load["p99"] for load in loads)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_client_that_is_the_limit_says_so() -> None:
    results = Results("64 clients", "clients", 64, [0.01] * 10, seconds=1.0, cpu=0.97)
    assert "this client has used 97% of a core" in table([results])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("http://x --shape a", "--shape a: expected numbers"),
        ("http://x --shape 2 --rate 0", "--rate 0: expected numbers"),
        ("http://x --shape 2 --clients 1.5", "--clients 1.5: expected numbers"),
        ("http://x --shape 2 --seconds 0", "--seconds 0.0: expected more than 0"),
        ("http://x --shape 2 --dtype text", "--dtype text"),
        ("ftp://x --shape 2", "'ftp://x': expected a URL such as"),
        ("http://x:port --shape 2", "expected a URL such as"),
        ("http://x --shape 2 --header nonsense", "--header 'nonsense': expected NAME:VALUE"),
        ("http://x --body /no/such/file.json", "No such file"),
    ],
)
def test_wrong_options(options: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve-bench", *options.split()]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_the_benchmark_measures_ours_and_says_which_peers_are_missing(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.serving", "gpu", "--turns", "1", "--seconds", "0.3", "--clients", "8"]
    done = subprocess.run([*command, "--json", str(figures)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    measured, missing = found["serving"]["gpu"], found["skipped"]
    ours = {"hvdlite", "hvdlite, p99 50 ms", "hvdlite, 10 ms", "hvdlite, no batches"}
    assert {*measured} == {*ours, "mosec", "LitServe"} - {*missing}
    assert all("No module named" in reason for reason in missing.values())
    assert measured["hvdlite, no batches"][0]["p50"] > 8 * 0.0051  # the eight clients are served one after another
    assert all(f"without {peer}: " in done.stdout for peer in missing)
