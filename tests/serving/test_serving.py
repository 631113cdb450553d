"""Servers with real processes and sockets: replicas that die, bad starts, and clients that misbehave."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import hvdlite
from hvdlite.errors import ArgumentError, HvdliteError, LaunchError
from hvdlite.serving import wire
from hvdlite.serving.metrics import CHOICE
from hvdlite.serving.options import Options, seconds, size
from hvdlite.serving.replicas.computing import OutputError, compute
from hvdlite.serving.replicas.replica import Begin, load, warm_up
from hvdlite.serving.servable import Servable
from hvdlite.serving.serve import serve
from hvdlite.serving.server import Server
from hvdlite.tools.cli import main
from tests.programs.servables import BAD, ENDLESS, FATAL, FATAL_ONCE
from tests.support.browser import MISSING, browser
from tests.support.jobs import PYTHONPATH
from tests.support.servers import HEAD, exchange, in_thread


@pytest.mark.slow
def test_a_job_with_replicas_that_die(tmp_path: Path) -> None:
    """300 numbers from 50 clients; meanwhile one replica dies once, another again and again, one never answers, one raises."""
    command = [sys.executable, "-m", "hvdlite", "serve", "tests.programs.servables:counted", "--replicas", "2"]
    command += ["--port", "0", "--max-wait", "2", "--max-batch", "16", "--timeout", "1s", "--lame-duck", "0"]
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH, "SERVABLES_FOLDER": str(tmp_path)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
    assert process.stderr
    lines = [process.stderr.readline()]
    url = re.findall(r"http://\S+:\d+", lines[0])[0]
    while "Ready" not in lines[-1]:
        lines.append(process.stderr.readline())
        assert lines[-1], lines

    async def ask_all() -> dict[int, httpx.Response]:
        numbers = [*range(FATAL_ONCE), FATAL_ONCE, FATAL, BAD, ENDLESS]
        numbers = numbers[::7] + [number for place, number in enumerate(numbers) if place % 7]
        answers = {}
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:

            async def ask() -> None:
                while numbers:
                    number = numbers.pop(0)
                    answers[number] = await client.post("/v1/predict", json={"input": number})

            await asyncio.gather(*[ask() for _ in range(50)])
            answers[-1] = await client.get("/metrics")
        return answers

    try:
        answers = asyncio.run(ask_all())
        metrics = answers.pop(-1).text
        expected = dict.fromkeys(range(FATAL_ONCE + 1), 200) | {FATAL: 503, BAD: 500, ENDLESS: 503}
        assert {number: answer.status_code for number, answer in answers.items()} == expected
        assert all(answers[number].json() == {"output": number} for number in range(FATAL_ONCE + 1))
        lost = re.search(r"^hvdlite_serve_replicas_lost_total (\d+)", metrics, re.MULTILINE)
        again = re.findall(r"^hvdlite_serve_recomputed_total\{.*\} (\d+)", metrics, re.MULTILINE)
        begun = [np.fromfile(each, np.int64) for each in tmp_path.glob("begun-*")]
        numbers, times = np.unique(np.concatenate(begun), return_counts=True)
        assert numbers.tolist() == sorted(expected)
        # Zeros are what replicas warm up with. Of the others, none was computed again that was not counted.
        assert times[1:].sum() <= len(expected) - 1 + sum(map(int, again))
        assert lost and int(lost[1]) >= 3  # of five; fewer if two of these numbers were in one batch
        process.send_signal(signal.SIGTERM)
        said = "".join([*lines, *process.stderr])
        assert process.wait(30) == 0, said
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert "was ended by SIGKILL. It is replaced." in said
    assert "ended with exit code 7. It is replaced." in said
    assert re.search(r"took longer than 1 s for a batch of \d+ \(--timeout\). It is replaced.", said)
    assert re.search(r"--timeout\)\. It is here:.*servables\.py\", line \d+ in numbers", said, re.DOTALL)
    assert said.count("ValueError: a bad number") == 1


STARTS = {
    "no module": ("nowhere:predict", "there is no module 'nowhere' for 'nowhere:predict': it is looked for in"),
    "no name": ("tests.programs.servables:nowhere", "has no 'nowhere': give the name of a function that takes a batch"),
    "no function": ("tests.programs.servables:no_function", "is a int: expected a function"),
    "few": ("tests.programs.servables:few", "returned a ndarray of 0 for 1 inputs: expected one output for each input"),
    "none": ("tests.programs.servables:none", "returned a NoneType: expected an array or a list of 1 outputs"),
    "wrong spec": ("tests.programs.servables:wrong_spec", r"batch of 1 × float32 \(2,\). Give hvd.servable an example"),
}


@pytest.mark.parametrize("name", STARTS)
def test_what_a_replica_says_at_its_start(name: str) -> None:
    what, words = STARTS[name]
    begin = Begin(what, list(sys.path), 32)
    with pytest.raises(HvdliteError, match=words):
        warm_up(load(begin), 32)


FAILED_STARTS = {
    "import": ("tests.programs.servables_fail:x", "No module named 'a_package_that_is_not_there'"),
    "memory": ("tests.programs.servables:large", r"batch of 32 .*does not fit into memory: give a smaller --max-batch"),
    "crash": (
        "tests.programs.servables:crashes",
        "was ended by SIGKILL while it imported .*: give a smaller --max-batch",
    ),
    "waits": (
        "tests.programs.servables:waits",
        r"took longer than 0\.\d s to import .*see above where it is.*give a longer --start-timeout",
    ),
}


@pytest.mark.parametrize("name", FAILED_STARTS)
def test_what_cannot_be_served_is_said_at_the_start(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    what, words = FAILED_STARTS[name]
    limit = "0.7s" if name == "waits" else "30s"
    assert main(["serve", what, "--port", "0", "--max-wait", "0", "--start-timeout", limit]) == 2
    said = capfd.readouterr().err
    assert re.search(words, said, re.DOTALL), said
    assert f"hvdlite: {what} cannot be served" in said


def test_a_port_in_use(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["serve", "tests.programs.servables:counted", "--port", str(port)]) == 2
    said = capfd.readouterr().err
    assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in said
    assert f"ss -ltnp 'sport = :{port}' names it" in said and "give another --port" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["m:f", "--max-batch", "0"], "max_batch=0: expected a whole number from 1 on"),
        (["m:f", "--port", "99999"], "port=99999: expected a number from 0 to 65535"),
        (["m:f", "--max-wait", "soon"], "'soon': expected a time, such as 50ms"),
        (["m:f", "--max-body", "1X"], "'1X': expected a number of bytes"),
        (["m:f", "--timeout", "0"], "timeout=0.0: expected a time above 0 seconds"),
        (["m:f", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY: the environment has no such variable"),
        (["model.py"], "expected module:name, such as my_model:predict"),
        ([], "give MODULE:NAME of what is to be served"),
        (["m:f", "--max-connections", "1000000000"], "give a smaller --max-connections"),
        (["--explain", "--port", "1"], "no server answers at http://127.0.0.1:1/explain"),
        (["m:f", "--host", "nowhere.invalid"], "cannot listen on nowhere.invalid, port 8000"),
    ],
)
def test_bad_options(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_replicas_end_with_a_server_that_is_killed(tmp_path: Path) -> None:
    """Also in the middle of a batch, which the replica says by a file."""
    program = (
        "import os, pathlib, time, hvdlite\n"
        "def predict(batch):\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'new').write_text(str(os.getpid()))\n"
        f"    os.rename({str(tmp_path / 'new')!r}, {str(tmp_path / 'pid')!r})\n"
        "    time.sleep(1000)\n"
        "hvdlite.serve(predict, port=0, max_wait=0.0)\n"
    )
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": PYTHONPATH})
    assert process.stderr
    try:
        url = re.findall(r"http://\S+:\d+", process.stderr.readline())[0]
        while "Ready" not in process.stderr.readline():
            assert process.poll() is None
        request = HEAD + b'content-length: 12\r\n\r\n{"input": 5}'
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
            connection.sendall(request)
            while not (tmp_path / "pid").exists():
                os.sched_yield()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    replica = Path("/proc", (tmp_path / "pid").read_text())
    while replica.exists() and "\nState:\tZ" not in (replica / "status").read_text():
        os.sched_yield()  # pytest's time limit ends this if the replica stays


def test_clients_that_misbehave_and_one_that_does_not(tmp_path: Path) -> None:
    whole = HEAD + b'connection: close\r\ncontent-length: 12\r\n\r\n{"input": 5}'
    with in_thread(lambda batch: batch + 1, max_connections=4, read_timeout=0.3, max_body=2**20) as server:
        assert exchange(server.url, whole).endswith(b'{"output":6}')
        assert b" 408 " in exchange(server.url, b"POST /v1/pre")
        assert b" 408 " in exchange(server.url, HEAD + b'content-length: 12\r\n\r\n{"in')
        long = b"y" * 2**20
        assert b" 413 " in exchange(server.url, HEAD + b"content-length: 20971520\r\n\r\n", *[long] * 20)
        chunks = [b"100000\r\n" + long + b"\r\n"] * 20
        assert b" 413 " in exchange(server.url, HEAD + b"transfer-encoding: chunked\r\n\r\n", *chunks)
        assert b" 400 " in exchange(server.url, b"nonsense\r\n\r\n")
        many = exchange(server.url, b"GET / HTTP/1.1\r\n", *[b"x: " + b"y" * 2**14 + b"\r\n"] * 8)
        assert b" 431 " in many
        assert b" 431 " in exchange(server.url, b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000 + b"\r\n\r\n")
        assert b" 431 " in exchange(server.url, b"GET /" + b"y" * 100_000 + b" HTTP/1.1\r\n\r\n")
        chunked = HEAD + b'transfer-encoding: chunked\r\n\r\nc\r\n{"input": 5}\r\n0\r\n'
        assert exchange(server.url, chunked + b"x: y\r\nconnection: close\r\n\r\n", end=True).endswith(b'{"output":6}')
        trailers = [b"".join(b"x%d: " % number + b"y" * 1000 + b"\r\n" for number in range(1000))] * 20
        assert b" 431 " in exchange(server.url, chunked, *trailers)
        assert b" 431 " in exchange(server.url, chunked + b"x: ", *[long] * 20)  # one, which never ends
        assert b" 431 " in exchange(server.url, chunked[:-3] + b"0;x=", *[long] * 20)
        assert exchange(server.url, b"GET /\r\n\r\n").startswith(b"HTTP/1.1 400 ")
        half_closed = whole.replace(b"connection: close\r\n", b"")
        assert exchange(server.url, half_closed, half_closed, end=True).count(b'{"output":6}') == 2


def test_an_input_that_no_body_may_have_is_said_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    large = hvdlite.servable(lambda batch: batch, dtype="float32", shape=(600,))
    with caplog.at_level("INFO"), in_thread(large, max_body=2000, max_batch=1, max_wait=0.0):
        assert (
            "An input has 2400 bytes, and a body may have 2000: requests are answered 413. Give a larger" in caplog.text
        )


@pytest.mark.skipif(bool(MISSING), reason=f"{MISSING}: the page is tried in it")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    doubles = hvdlite.servable(lambda batch: 2 * batch, dtype="float32", shape=(2,))
    with in_thread(doubles, api_key="secret", max_wait=0.0) as server, browser() as page:
        page.go(server.url)
        assert "An input is an array of float32, shape (2,)." in page.text("p")
        page.click("#send")
        page.wait_for(lambda: page.text("#answer").startswith("401, "))
        page.run("document.querySelector('#key').value = 'secret'")
        page.run("document.querySelector('#body').value = '{\"input\": [1.5, 4]}'")
        page.click("#send")
        page.wait_for(lambda: page.text("#answer").startswith("200, "))
        assert page.text("#answer").endswith('{"output":[3.0,8.0]}')
        page.picture(tmp_path / "page.png")


def test_a_server_answers_what_is_there_before_it_ends() -> None:
    threads = str(Options().threads)
    with in_thread(lambda batch: [os.environ["OMP_NUM_THREADS"]] * len(batch), max_wait=1000.0) as server:

        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
                waits = asyncio.create_task(client.post("/v1/predict", json={"input": 5}))
                while "hvdlite_serve_queue_length 1.0" not in (await client.get("/metrics")).text:
                    await asyncio.sleep(0.01)
                server.stop()
                return await waits

        assert asyncio.run(ask()).json() == {"output": os.environ.get("OMP_NUM_THREADS", threads)}


class Sharing:
    """Answers with the numbers of the processes that share a file with this one."""

    def share(self, descriptor: int) -> None:
        self._file = os.dup(descriptor)
        os.write(
            self._file, b"%d " % os.getpid()
        )  # behind what others have written, for they have the same place in it

    def __call__(self, batch: Any) -> Any:
        return [os.pread(self._file, 99, 0).decode()] * len(batch)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has files in memory")
def test_replicas_have_a_file_in_memory_in_common() -> None:
    with in_thread(Sharing(), replicas=2, max_wait=0.0) as server, httpx.Client(base_url=server.url) as client:
        while client.get("/readyz").json()["replicas"] < 2:
            time.sleep(0.01)
        found = client.post("/v1/predict", json={"input": 5}).json()["output"]
        assert sorted(map(int, found.split())) == sorted(server.pids)
        count = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) < count


def test_a_server_does_not_wait_for_ever() -> None:
    """Neither after the time that it has for the last answers, nor after a second signal."""
    for settings, stops in (({"drain": 0.1}, 1), ({}, 2)):
        with in_thread("tests.programs.servables:numbers", **settings) as server:

            async def ask(server: Server, stops: int) -> httpx.Response:
                async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
                    endless = asyncio.create_task(client.post("/v1/predict", json={"input": ENDLESS}))
                    while "hvdlite_serve_computing 1.0" not in (await client.get("/metrics")).text:
                        await asyncio.sleep(0.01)
                    for _ in range(stops):
                        server.stop()
                    return await endless

            answer = asyncio.run(ask(server, stops))
            assert answer.status_code == 503 and "the server ends" in answer.json()["error"]


def test_the_wait_is_chosen_while_it_serves() -> None:
    with in_thread(lambda batch: batch, slo_p99=0.05) as server:

        async def ask() -> str:
            async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
                while True:
                    await asyncio.gather(*[client.post("/v1/predict", json={"input": 5}) for _ in range(8)])
                    said = (await client.get("/explain")).text
                    if "too few have come" not in said:
                        return said + (await client.get("/metrics")).text

        said = asyncio.run(asyncio.wait_for(ask(), 60))
        assert "a p99 of at most 50 ms" in said  # a busy machine may have no wait that meets it
        for name in CHOICE:
            assert re.search(rf"^hvdlite_serve_{name} [0-9.e-]+$", said, re.MULTILINE), name
    with pytest.raises(ArgumentError, match="with a bound the wait is chosen"):
        Options(slo_p99=0.05, max_wait=0.01)
    with pytest.raises(ArgumentError, match="slo_p99=0: expected a time above 0"):
        Options(slo_p99=0)


class NoArray:
    """A value that cannot be sent."""


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (5, "returned a int: expected an array or a list of 2 outputs"),
        ("ab", "returned a str of 2 for 2 inputs"),
        ([1], "returned a list of 1 for 2 inputs"),
        ([NoArray(), 1], "returned a tests.serving.test_serving.NoArray, which cannot be sent"),
        (np.array([None, 1]), "returned an array of object"),
    ],
)
def test_outputs_that_are_none(outputs: Any, words: str) -> None:
    with pytest.raises(OutputError, match=words):
        compute(Servable(lambda batch: outputs), [1, 2])


@pytest.mark.parametrize(
    "values",
    [
        [np.arange(6.0).reshape(2, 3), np.ones((2, 3))],
        [np.arange(6).reshape(2, 3).T, np.zeros((3, 2), int)],
        [np.zeros((0, 2)), np.zeros((0, 2))],
        [np.float32(3.0) * np.ones(()), np.ones((), np.float32)],
        [np.ones(2), np.ones(3), "text", {"a": [1, None]}],
        np.array(["ab", "c"]),
        np.array([True, False]),
    ],
)
def test_what_travels_arrives(values: Any) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        how, buffers = wire.pack(values)
        wire.send(ours, wire.frame(how, buffers))
        found, data = wire.receive(theirs)
        ours.close()
        for one, other in zip(wire.unpack(found, data), values, strict=True):
            np.testing.assert_equal(one, other)
        with pytest.raises(EOFError):
            wire.receive(theirs)


def test_large_batches_travel_both_ways() -> None:
    rows = np.random.default_rng(0).normal(size=(4, 300_000))
    with in_thread(lambda batch: batch * 2, max_wait=0.2, max_batch=4) as server:

        async def ask() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
                kind = {"content-type": "application/msgpack"}
                return await asyncio.gather(
                    *[client.post("/v1/predict", content=packed(row), headers=kind) for row in rows]
                )

        import msgpack

        def packed(row: Any) -> bytes:
            return bytes(msgpack.packb({"input": {"dtype": "<f8", "shape": row.shape, "data": row.tobytes()}}))

        for row, answer in zip(rows, asyncio.run(ask()), strict=True):
            np.testing.assert_array_equal(np.frombuffer(msgpack.unpackb(answer.content)["output"]["data"]), row * 2)


def test_texts_for_times_and_sizes() -> None:
    assert [seconds(text) for text in ("50", "50ms", "0.5 s", "2min")] == [0.05, 0.05, 0.5, 120.0]
    assert [size(text) for text in ("5", "8M", "1.5 KiB", "2GB")] == [5, 8 * 2**20, 1536, 2 * 2**30]


def test_settings_and_functions_that_are_none() -> None:
    with pytest.raises(ArgumentError, match="there is no setting 'batch'; there are replicas, devices"):
        serve("m:f", batch=3)
    with pytest.raises(ArgumentError, match="expected a function, or module:name of one"):
        hvdlite.serve(3)  # type: ignore[arg-type]
    lock = threading.Lock()
    with pytest.raises(LaunchError, match="cannot be sent to the replicas: .*Put it into a module"):
        hvdlite.serve(lambda batch: [lock] * len(batch))


def test_servable_decorates() -> None:
    @hvdlite.servable(dtype="float32", shape=(2,))
    def sums(batch: Any) -> Any:
        return batch.sum(1)

    assert isinstance(sums, Servable) and (sums.spec.dtype, sums.spec.shape) == ("float32", (2,))
    assert compute(sums, np.ones((3, 2))).tolist() == [2, 2, 2]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "words"}, "dtype='words': expected the name of a dtype"),
        ({"dtype": "U3"}, "expected booleans or numbers"),
        ({"shape": (-1, 2)}, "expected lengths of axes from 0 on"),
        ({"pad": 3}, "pad=3: expected a function"),
    ],
)
def test_bad_servables(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        hvdlite.servable(lambda batch: batch, **settings)
    with pytest.raises(ArgumentError, match="expected a function; got a int"):
        hvdlite.servable(3)  # type: ignore[arg-type]
