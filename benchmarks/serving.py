"""Measure ``hvdlite serve`` and other servers with dynamic batching side by side.

    python -m benchmarks.serving                        about two minutes for each model
    python -m benchmarks.serving gpu --turns 3 --site /tmp/peers
    pip install --target /tmp/peers mosec litserve      keeps them out of this environment

All servers are started, each with one process that computes, and are measured in turns by 64 closed-loop clients, which send
JSON. Those that are not measured are stopped meanwhile (SIGSTOP). The models are *gpu*, which waits 5 ms and 0.1 ms for each
input, and *digits*, a convolutional network on the CPU with one thread. The largest batch is 32. The peers wait up to 10 ms for
a batch, which is mosec's own setting. Ours chooses its wait for the least mean latency, which is its own setting. It is
measured with a bound of 50 ms for the p99, with 10 ms, and without batches, too. Before a server is measured, it must give the
right answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.figures import in_turn
from benchmarks.job import ROOT
from benchmarks.machine import machine
from benchmarks.report import aligned, skipped
from benchmarks.serving_models import SHAPES, load
from hvdlite.serving.bench import bodies
from hvdlite.serving.bench.client import target
from hvdlite.serving.bench.load import closed_loop
from hvdlite.serving.bench.results import Results

OURS = "hvdlite"
OPTIONS = {
    OURS: [],
    "hvdlite, p99 50 ms": ["--slo-p99", "50ms"],
    "hvdlite, 10 ms": ["--max-wait", "10ms"],
    "hvdlite, no batches": ["--max-batch", "1", "--max-wait", "0"],
}
PEERS = {"mosec": "mosec", "LitServe": "litserve"}
MAX_BATCH, WAIT = 32, 10
WARM_UP, PATIENCE = 1.5, 60.0


class FailedError(Exception):
    """A server does not run, or answers wrongly."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(SHAPES)} (all)")
    parser.add_argument("--turns", type=int, default=3, help="of each server (3)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn (4)")
    parser.add_argument("--clients", type=int, default=64, help="closed-loop clients (64)")
    parser.add_argument("--site", type=Path, help="a folder into which pip has installed the peers with --target")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args(arguments)
    if wrong := [model for model in options.models if model not in SHAPES]:
        parser.error(f"there is no model {wrong[0]!r}; there are {', '.join(SHAPES)}")
    here = machine()
    print(f"{here['date']}, {here['cores']} cores ({here['cpu']}), load {here['load_average']:.1f} at the start")
    missing = {peer: reason for peer, package in PEERS.items() if (reason := _missing(package, options.site))}
    if missing:
        print(skipped(missing))
    figures = {}
    try:
        for model in options.models or SHAPES:
            figures[model] = asyncio.run(_measure(model, [peer for peer in PEERS if peer not in missing], options))
            print(f"\n{model}, {options.clients} clients, medians of {options.turns} turns\n{_table(figures[model])}")
    except FailedError as error:
        print(f"python -m benchmarks.serving: {error}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps({"machine": here, "skipped": missing, "serving": figures}, indent=2) + "\n")
    return 0


async def _measure(model: str, peers: Sequence[str], options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Return the figures of each server's turns."""
    names = [*OPTIONS, *peers]
    sent = bodies.random(SHAPES[model], "float32", as_json=True)
    figures: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(_server(name, model, options.site)) for name in names}
        for name, (url, process) in servers.items():
            check(name, url, process, model, sent.data[0])
            os.killpg(process.pid, signal.SIGSTOP)
        with tqdm(total=options.turns * len(names), unit="turn", leave=False, disable=None) as progress:
            for turn in range(options.turns):
                for name in in_turn(names, turn):
                    progress.set_description(f"{model}, {name}")
                    url, process = servers[name]
                    os.killpg(process.pid, signal.SIGCONT)
                    result = await closed_loop(
                        *(target(url, sent, {}), options.clients, options.seconds, 1.5, 30.0, progress.set_postfix_str)
                    )
                    os.killpg(process.pid, signal.SIGSTOP)  # some look for requests a thousand times a second
                    figures[name].append(_checked(name, result))
                    progress.update()
    return figures


def _checked(name: str, result: Results) -> dict[str, Any]:
    if result.failed:
        raise FailedError(f"{name} fails: {'; '.join(result.notes())}")
    if not result.latencies:
        raise FailedError(f"{name} has answered nothing for {result.seconds:.1f} s")
    return result.as_dict()


def _server(
    name: str, model: str, site: Path | None
) -> contextlib.AbstractContextManager[tuple[str, subprocess.Popen[bytes]]]:
    """Run a server, and give the URL to which requests go, and the process."""
    if name not in PEERS:
        return ours(model, name, *OPTIONS[name])
    environ = _with_site(os.environ, site) | {"SERVING_PEER": f"{PEERS[name]} {model} {MAX_BATCH} {WAIT}"}
    return _running(name, ["-m", "benchmarks.serving_peers"], "/inference", environ)


def ours(
    model: str, name: str, *options: str
) -> contextlib.AbstractContextManager[tuple[str, subprocess.Popen[bytes]]]:
    """Run ``hvdlite serve`` with a model, and give the URL to which requests go, and the process."""
    command = ["-m", "hvdlite", "serve", f"benchmarks.serving_models:{model}", *options]
    return _running(name, command, "/v1/predict", os.environ)


@contextlib.contextmanager
def _running(
    name: str, command: Sequence[str], path: str, environ: Mapping[str, str]
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, *command, "--port", str(port)],
            cwd=ROOT,
            env={**environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            yield f"http://127.0.0.1:{port}{path}", process
        except FailedError as error:
            if str(error).startswith(f"{name} "):
                log.seek(0)
                raise FailedError(f"{error}. Its log:\n{log.read()[-2000:]}") from None
            raise
        finally:
            os.killpg(process.pid, signal.SIGCONT)
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            with contextlib.suppress(ProcessLookupError):  # LitServe leaves processes behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def check(name: str, url: str, process: subprocess.Popen[bytes], model: str, body: bytes) -> None:
    """Wait until a server answers, and see that the answer is right."""
    expected = load(model)(np.array([json.loads(body)["input"]], np.float32))[0]
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    begin = time.monotonic()
    while True:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                found = json.loads(answer.read())["output"]
            break
        except OSError as error:
            is_final = isinstance(error, urllib.error.HTTPError) and error.code != 503
            if is_final or process.poll() is not None or time.monotonic() > begin + PATIENCE:
                raise FailedError(f"{name} does not answer: {error}") from None
            time.sleep(0.1)
    if not np.allclose(found, expected, rtol=1e-4, atol=1e-5):
        raise FailedError(f"{name} answers {found}; expected {expected}")


def _missing(package: str, site: Path | None) -> str:
    """Return why a peer cannot be measured; empty if it can."""
    found = subprocess.run(
        [sys.executable, "-c", f"import {package}"], env=_with_site(os.environ, site), capture_output=True, text=True
    )
    return found.stderr.strip().rpartition("\n")[2] if found.returncode else ""


def _with_site(environ: Mapping[str, str], site: Path | None) -> dict[str, str]:
    if site is None:
        return dict(environ)
    # mosec looks for its program in the folders for scripts, of which the user's can be given.
    paths = os.pathsep.join([str(site), environ.get("PYTHONPATH", "")])
    return {**environ, "PYTHONPATH": paths, "PYTHONUSERBASE": str(site)}


def _table(figures: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Write the medians of the turns, and the ratios of ours to each."""
    medians = {
        name: {
            key: statistics.median(turn[key] for turn in turns) for key in ("throughput", "p50", "p99", "client_cpu")
        }
        for name, turns in figures.items()
    }
    ours = medians[OURS]
    rows = [["", "requests/s", "p50 ms", "p99 ms", "ours ÷ it: requests/s", "p99", "core of the client"]]
    for name, each in medians.items():
        rows.append(
            [
                *(name, f"{each['throughput']:.0f}", f"{each['p50'] * 1e3:.1f}", f"{each['p99'] * 1e3:.1f}"),
                *(f"{ours['throughput'] / each['throughput']:.2f}", f"{ours['p99'] / each['p99']:.2f}"),
                f"{each['client_cpu']:.0%}",
            ]
        )
    return aligned(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
