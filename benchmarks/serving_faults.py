"""Tries a server with replicas that are killed, and with clients that misbehave, and counts what becomes of the requests.

    python -m benchmarks.serving_faults kills --requests 100000     two minutes
    python -m benchmarks.serving_faults clients                     half a minute

*kills*: closed-loop clients send numbers, which `predict` repeats. At random moments a replica is killed, or stopped, so that
it blocks until the server replaces it. One number of 997 makes `predict` raise, and one of 4999 ends its replica. Each replica
writes down the numbers with which it begins, so that one sees what was computed twice. The program fails if a request is lost,
has a wrong answer, or was computed again and not counted as such.

*clients*: one client asks again and again and measures its latency, while others open 10 000 connections and leave them, send
100 MB, send slowly, or send nonsense. The memory of the server is measured too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

FOLDER = "SERVING_FAULTS_FOLDER"
RAISES, ENDS = 997, 4999
"""Multiples of these do so."""
HEAD = "POST /v1/predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def numbers(batch: Any) -> Any:
    """Repeat the numbers of a batch, after writing them down."""
    with open(Path(os.environ[FOLDER], str(os.getpid())), "ab", buffering=0) as file:
        file.write(np.asarray(batch, np.int64).tobytes())
    time.sleep(0.002)
    if any(number and number % ENDS == 0 for number in batch):
        os._exit(7)
    if any(number and number % RAISES == 0 for number in batch):
        raise ValueError("a multiple of 997")
    return batch


def double(batch: Any) -> Any:
    """Something easy, for the clients."""
    return np.asarray(batch) * 2


@contextlib.asynccontextmanager
async def server(what: str, *options: str, folder: str = "") -> AsyncIterator[tuple[int, int]]:
    """Run a server, and give its port and its process number."""
    command = [sys.executable, "-m", "hvdlite", "serve", f"benchmarks.serving_faults:{what}", "--port", "0", *options]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, FOLDER: folder})
        try:
            while "Ready" not in (said := _text(log)):
                if process.poll() is not None:
                    raise SystemExit(said)
                await asyncio.sleep(0.05)
            found = re.search(r"http://[^:]+:(\d+)", said)
            assert found
            yield int(found[1]), process.pid
            process.send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(process.wait, 60)
            print(f"the server's exit code after SIGTERM: {code}")
        finally:
            process.kill()
            process.wait()
            if "Traceback" in _text(log):
                print(_text(log)[-3000:])


def _text(log: Any) -> str:
    log.seek(0)
    return str(log.read())


class Client:
    """A connection that asks one thing after another."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, value: Any) -> tuple[int, Any]:
        """Send an input, and return the status and the answer."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        body = json.dumps({"input": value})
        self._writer.write(f"{HEAD}content-length: {len(body)}\r\n\r\n{body}".encode())
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = re.search(r"content-length: (\d+)", head)
        assert length
        answer = json.loads(await self._reader.readexactly(int(length[1])))
        if "connection: close" in head:
            self.close()
        return int(head.split()[1]), answer

    def close(self) -> None:
        """End the connection."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(entry.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.parent.name))
    return found


async def kills(options: argparse.Namespace) -> None:
    """Kill replicas at random moments, and account for every request."""
    chance = random.Random(options.seed)
    statuses: Counter[int] = Counter()
    wrong: list[tuple[int, Any]] = []
    killed: Counter[str] = Counter()
    innocent_lost = np.zeros(options.requests, bool)
    todo = iter(tqdm(range(options.requests), mininterval=1))
    with tempfile.TemporaryDirectory() as folder:
        settings = ["--replicas", str(options.replicas), "--timeout", "1s", "--max-wait", "2ms"]
        async with server("numbers", *settings, folder=folder) as (port, pid):

            async def ask() -> None:
                client = Client(port)
                for number in todo:
                    status, answer = await client.ask(number)
                    statuses[status] += 1
                    is_bad = number > 0 and (number % ENDS == 0 or number % RAISES == 0)
                    if status not in ((500, 503) if is_bad else (200, 503)):
                        wrong.append((number, status))
                    if status == 200 and answer != {"output": number}:
                        wrong.append((number, answer))
                    innocent_lost[number] = status == 503 and not is_bad
                client.close()

            async def kill() -> None:
                while True:
                    await asyncio.sleep(chance.expovariate(1 / options.every))
                    if replicas := children(pid):
                        how = signal.SIGSTOP if chance.random() < 0.1 else signal.SIGKILL
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(chance.choice(replicas), how)
                            killed[how.name] += 1

            killing = asyncio.create_task(kill())
            begin = time.perf_counter()
            await asyncio.gather(*[ask() for _ in range(options.clients)])
            seconds = time.perf_counter() - begin
            killing.cancel()
            metrics = await _get(port, "/metrics")
        files = [np.fromfile(path, np.int64) for path in Path(folder).iterdir()]
    begun = np.bincount(np.concatenate(files), minlength=options.requests)
    again = sum(_metric(metrics, f'recomputed_total{{reason="{reason}"}}') for reason in ("lost", "raised"))
    lost = _metric(metrics, "replicas_lost_total")
    print(f"{options.requests} requests of {options.clients} clients, {options.replicas} replicas, {seconds:.0f} s")
    print(f"signals: {dict(killed)}; replicas lost: {lost:.0f}")
    print(f"answers: {dict(statuses)}; wrong ones: {len(wrong)}; not bad, and lost two replicas: {innocent_lost.sum()}")
    print(f"sent to a replica again: {again:.0f}; begun twice: {(begun == 2).sum()}, more often: {(begun > 2).sum()}")
    assert sum(statuses.values()) == options.requests and set(statuses) <= {200, 500, 503}, "a request was lost"
    assert not wrong, wrong[:5]
    assert (begun[1:] - 1).clip(0).sum() <= again, "a request was computed twice, and not counted"


async def clients(options: argparse.Namespace) -> None:
    """Let clients misbehave, and see that another one is served."""
    async with server("double", "--read-timeout", "3s", "--max-body", "8M") as (port, pid):
        latencies: list[float] = []
        is_over = asyncio.Event()

        async def good() -> None:
            client = Client(port)
            while not is_over.is_set():
                begin = time.perf_counter()
                status, answer = await client.ask(3)
                assert (status, answer) == (200, {"output": 6}), (status, answer)
                latencies.append(time.perf_counter() - begin)
                await asyncio.sleep(0.005)

        chunk = b"100000\r\n" + b"x" * 2**20 + b"\r\n"
        behaving = asyncio.create_task(good())
        await asyncio.sleep(2)
        _show("alone", latencies, pid)
        for name, work in (
            ("100 MB", _send(port, b"content-length: 100000000\r\n\r\n", b"x" * 2**20, 100)),
            ("100 MB in chunks", _send(port, b"transfer-encoding: chunked\r\n\r\n", chunk, 100)),
            ("20 slow bodies", _many(20, port, b"content-length: 100\r\n\r\n{")),
            ("20 slow headers", _many(20, port, b"content-le")),
            ("nonsense", _send(port, b"nonsense\r\n\r\n", b"", 0)),
            (f"{options.connections} idle connections", _idle(port, options.connections)),
        ):
            latencies.clear()
            answers = await work
            await asyncio.sleep(0.5)
            _show(name, latencies, pid, answers)
        is_over.set()
        await behaving


async def _many(count: int, port: int, head: bytes) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in await asyncio.gather(*[_send(port, head, b"", 0) for _ in range(count)]):
        total += each
    return total


async def _send(port: int, head: bytes, piece: bytes, times: int) -> Counter[str]:
    """Send a request in pieces until its answer comes. Return its status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD.encode() + head)
    with contextlib.suppress(ConnectionError):
        for _ in range(times):
            writer.write(piece)
            await writer.drain()
    return Counter([await _status(reader, writer)])


async def _status(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    """Wait for an answer, and return its status."""
    try:
        line = await reader.readline()
        await reader.read()
        return line.split()[1].decode() if line else "closed"
    except ConnectionError:
        return "reset"
    finally:
        writer.close()


async def _idle(port: int, count: int) -> Counter[str]:
    opened = []
    for _ in range(count):
        opened.append(await asyncio.open_connection("127.0.0.1", port))
    return Counter(await asyncio.gather(*[_status(*each) for each in opened]))


def _show(name: str, latencies: list[float], pid: int, answers: Counter[str] | None = None) -> None:
    p50, p99 = np.percentile(latencies, (50, 99)) * 1000
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found
    said = "" if answers is None else f", answered {dict(answers)}"
    good = f"the good client {len(latencies)} times, p50 {p50:.1f} ms, p99 {p99:.1f} ms"
    print(f"{name}{said}: {good}; memory {int(found[1]) // 1024} MiB", flush=True)


async def _get(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    text = (await reader.read()).decode()
    writer.close()
    return text


def _metric(text: str, name: str) -> float:
    found = re.search(rf"^hvdlite_serve_{re.escape(name)} (\S+)", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def main() -> None:
    """Read the options, and run a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["kills", "clients"])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two kills, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--connections", type=int, default=10_000)
    options = parser.parse_args()
    asyncio.run(kills(options) if options.part == "kills" else clients(options))


if __name__ == "__main__":
    main()
