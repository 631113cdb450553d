"""``hvdlite serve-bench``: its options. What it runs is imported when it runs."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdlite.checks import require
from hvdlite.errors import ArgumentError
from hvdlite.serving.options import seconds

if TYPE_CHECKING:
    from hvdlite.serving.bench.bodies import Bodies
    from hvdlite.serving.bench.client import Target
    from hvdlite.serving.bench.results import Results

_DEFAULT_CLIENTS = "64"


def add_command(commands: Any) -> None:
    """Add ``serve-bench`` to the commands of a parser, which `argparse.ArgumentParser.add_subparsers` has returned."""
    parser = commands.add_parser(
        "serve-bench",
        help="measure how soon a server answers, by load (hvdlite docs serving)",
        description="Send requests to an HTTP server, and measure throughput and latency.",
        allow_abbrev=False,
    )
    parser.set_defaults(action=_run)
    add = parser.add_argument
    add("url", metavar="URL", help="the server; without a path, /v1/predict")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--clients", metavar="N[,N…]", help="closed loop: each client waits for its answer (64)")
    load.add_argument("--rate", metavar="R[,R…]", help="open loop: requests per second, at random (Poisson) times")
    load.add_argument("--trace", type=Path, metavar="FILE", help="open loop: a time in seconds in each line")
    add("--burst", type=int, default=1, metavar="N", help="with --rate: as many requests at once (1)")
    add("--seconds", type=float, default=10.0, metavar="S", help="how long each load takes (10)")
    add("--warm-up", type=float, default=1.0, metavar="S", help="closed loop: answers before do not count (1)")
    body = parser.add_mutually_exclusive_group(required=True)
    body.add_argument("--body", type=Path, nargs="+", metavar="FILE", help="what to send, in turn: .json, .npy, …")
    body.add_argument("--shape", metavar="N,N…", help='send random arrays of this shape; "" for single numbers')
    add("--dtype", default="float32", help="of --shape (float32)")
    add("--json", action="store_true", help='with --shape: send JSON, {"input": …}, in place of .npy')
    add("--content-type", metavar="TYPE", help="of --body, if the suffix does not say it")
    add("--header", action="append", default=[], metavar="NAME:VALUE", help="another header; may be repeated")
    add("--connections", type=int, default=1000, metavar="N", help="open loop: the most connections (1000)")
    add("--timeout", default="30s", metavar="TIME", help="a request that needs longer has failed (30s)")
    add("--plot", type=Path, metavar="FILE", help="draw latency against load")
    add("--save", type=Path, metavar="FILE", help="write the figures as JSON")
    add("--seed", type=int, default=0, metavar="N", help="where chance begins (0)")


def _run(found: argparse.Namespace) -> None:
    require("httptools", "serve", "hvdlite serve-bench")
    from hvdlite.serving.bench.client import target
    from hvdlite.serving.bench.results import table

    if found.plot:
        require("matplotlib", "examples", "hvdlite serve-bench --plot")
    for name in ("seconds", "burst", "connections"):
        if not getattr(found, name) > 0:
            raise ArgumentError(f"--{name} {getattr(found, name)}: expected more than 0.")
    if not found.warm_up >= 0:
        raise ArgumentError(f"--warm-up {found.warm_up}: expected 0 or more.")
    to = target(found.url, _bodies(found), dict(map(_header, found.header)))
    results = []
    for load in _loads(found, to):
        results.append(load(_show))
        if sys.stderr.isatty():
            _show("")
    print(table(results), end="")
    if found.save:
        found.save.write_text(
            json.dumps({"url": to.url, "loads": [each.as_dict() for each in results]}, indent=2) + "\n"
        )
    if found.plot:
        from hvdlite.serving.bench.plot import plot

        plot(results, to.url, found.plot)


def _bodies(found: argparse.Namespace) -> Bodies:
    from hvdlite.serving.bench.bodies import from_files, random

    if found.body:
        return from_files(found.body, found.content_type)
    return random(_numbers("--shape", found.shape, int, 0), found.dtype, found.json, found.seed)


def _loads(found: argparse.Namespace, to: Target) -> list[Callable[[Callable[[str], None]], Results]]:
    """Return a function for each load, which runs it."""
    from hvdlite.serving.bench import schedule
    from hvdlite.serving.bench.load import closed_loop, open_loop

    timeout = seconds(found.timeout)

    def by_times(times: Any, words: str) -> Callable[[Callable[[str], None]], Results]:
        return lambda show: asyncio.run(open_loop(to, times, words, found.connections, timeout, show))

    def by_clients(count: int) -> Callable[[Callable[[str], None]], Results]:
        return lambda show: asyncio.run(closed_loop(to, count, found.seconds, found.warm_up, timeout, show))

    if found.trace:
        return [by_times(schedule.trace(found.trace), found.trace.name)]
    if found.rate:
        in_bursts = f" in bursts of {found.burst}" if found.burst > 1 else ""
        return [
            by_times(schedule.poisson(rate, found.seconds, found.burst, found.seed), f"{rate:g}/s{in_bursts}")
            for rate in _numbers("--rate", found.rate, float, 1e-6)
        ]
    return [by_clients(count) for count in _numbers("--clients", found.clients or _DEFAULT_CLIENTS, int, 1)]


def _numbers(option: str, text: str, kind: Callable[[str], Any], least: float) -> list[Any]:
    try:
        numbers = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = [-1]
    if any(not least <= number < float("inf") for number in numbers) or not (numbers or option == "--shape"):
        raise ArgumentError(f"{option} {text}: expected numbers from {least:g} on, with commas between them.")
    return numbers


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or "\n" in text:
        raise ArgumentError(f"--header {text!r}: expected NAME:VALUE.")
    return name.strip().lower(), value.strip()


def _show(line: str) -> None:
    """Show how it goes: in place on a terminal, else a line each time."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()
    else:
        print(line, file=sys.stderr)
