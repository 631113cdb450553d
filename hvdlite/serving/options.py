"""The settings of a server, checked."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hvdlite.checks import check_count
from hvdlite.errors import ArgumentError

_UNITS = {"": 0.001, "ms": 0.001, "s": 1.0, "min": 60.0}
_SIZES = {letter + rest: 2.0**power for power, letter in ((10, "k"), (20, "m"), (30, "g")) for rest in ("", "b", "ib")}


@dataclass(frozen=True)
class Options:
    """The settings of a server. All times are in seconds.

    Attributes:
        replicas: The number of processes that compute.
        devices: The GPUs of the replicas: "auto", "none", or numbers, as `hvdlite.serving.replicas.devices.devices_of` says.
        threads_per_replica: The number of threads that each replica computes with; None to divide the cores among them.
        max_batch: The most inputs of a batch.
        max_wait: How long the oldest request waits for others; None to choose it while serving.
        slo_p99: The bound of the 99th percentile of the latency under which it is chosen; None for the least mean latency.
        host: The address to listen on.
        port: The port to listen on; 0 for any free one.
        api_key: What requests must show; empty if they need no key.
        max_queue: The most requests that wait for a replica.
        deadline: After so long a request that no replica has begun with is given up, unless it names a time of its own.
        timeout: After so long in one batch a replica is ended and replaced.
        start_timeout: After so long a replica that is not ready is ended.
        lame_duck: After SIGTERM, all is answered for so long, and ``/readyz`` says 503; 0 for not at all.
        drain: Then the port is closed, and requests that are there get so long.
        max_body: The most bytes of a request.
        max_memory: The most bytes of all requests that are being read or answered.
        read_timeout: A client gets so long to send a request's header, and as long again for its body. In each such time it
            takes 1000 bytes per second of its answer at least.
        keep_alive: A connection without a request is closed after so long.
        max_connections: The most connections at a time.
        page: A file with the HTML page of the path ``/``; empty for the server's own, on which one can try the model.
        certfile: A file with the server's certificate for TLS, and those of its authorities; empty for no TLS.
        keyfile: A file with the key of the certificate; empty if `certfile` has it too.
        root_path: The path before all others under which a proxy shows the server, such as "/models".
        cors: The origins whose pages may ask the server, separated by commas, or "*" for all; empty for none but its own.

    Raises:
        ArgumentError: A setting is out of its range.
    """

    replicas: int = 1
    devices: str = "auto"
    threads_per_replica: int | None = None
    max_batch: int = 32
    max_wait: float | None = None
    slo_p99: float | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""
    max_queue: int = 1024
    deadline: float = 30.0
    timeout: float = 60.0
    start_timeout: float = 300.0
    lame_duck: float = 5.0
    drain: float = 30.0
    max_body: int = 8 * 2**20
    max_memory: int = 512 * 2**20
    read_timeout: float = 20.0
    keep_alive: float = 5.0
    max_connections: int = 1000
    page: str = ""
    certfile: str = ""
    keyfile: str = ""
    root_path: str = ""
    cors: str = ""

    def __post_init__(self) -> None:
        for name in ("replicas", "max_batch", "max_queue", "max_body", "max_memory", "max_connections"):
            check_count(f"serve: {name}", getattr(self, name))
        if self.threads_per_replica is not None:
            check_count("serve: threads_per_replica", self.threads_per_replica)
        for name in ("slo_p99", "deadline", "timeout", "start_timeout", "drain", "read_timeout", "keep_alive"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ArgumentError(f"serve: {name}={value!r}: expected a time above 0 seconds.")
        if not self.lame_duck >= 0:
            raise ArgumentError(f"serve: lame_duck={self.lame_duck!r}: expected a time of 0 seconds or more.")
        if self.slo_p99 is not None and self.max_wait is not None:
            raise ArgumentError(
                f"serve: max_wait={self.max_wait!r} and slo_p99={self.slo_p99!r}: give one of them, for with a bound the "
                "wait is chosen."
            )
        if self.page and not os.access(self.page, os.R_OK):
            raise ArgumentError(f"serve: page={self.page!r}: there is no such file, or it cannot be read.")
        if self.keyfile and not self.certfile:
            raise ArgumentError(f"serve: keyfile={self.keyfile!r} without a certfile: TLS needs a certificate.")
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path):
            raise ArgumentError(f"serve: root_path={self.root_path!r}: expected a path such as /models.")
        if self.cors and not all(re.fullmatch(r"\*|https?://[^/\s]+", origin) for origin in self.origins):
            raise ArgumentError(f"serve: cors={self.cors!r}: expected origins such as https://example.org, or *.")
        if not 0 <= self.port < 2**16:
            raise ArgumentError(f"serve: port={self.port!r}: expected a number from 0 to 65535.")

    @property
    def origins(self) -> list[str]:
        """The origins whose pages may ask the server."""
        return [origin.strip() for origin in self.cors.split(",")] if self.cors else []

    @property
    def threads(self) -> int:
        """The number of threads that each replica computes with."""
        if self.threads_per_replica is not None:
            return self.threads_per_replica
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cores // self.replicas)


def seconds(text: str) -> float:
    """Read a time such as "50ms", "2s", "1min", or "50", which are milliseconds.

    Raises:
        ArgumentError: The text is no time.
    """
    return _number(text, _UNITS, "a time, such as 50ms or 2s (without a unit: milliseconds)")


def count(text: str) -> int:
    """Read a whole number.

    Raises:
        ArgumentError: The text is none.
    """
    if not text.isdecimal():
        raise ArgumentError(f"{text!r}: expected a whole number from 1 on, or auto.")
    return int(text)


def size(text: str) -> int:
    """Read a number of bytes such as "8M" or "8MiB".

    Raises:
        ArgumentError: The text is no number of bytes.
    """
    return int(_number(text, {"": 1.0, "b": 1.0, **_SIZES}, "a number of bytes, such as 8M"))


def _number(text: str, units: Mapping[str, float], what: str) -> float:
    found = re.fullmatch(r"([0-9.]+)\s*([a-z]*)", text.strip().lower())
    try:
        if found and found[2] in units:
            return float(found[1]) * units[found[2]]
    except ValueError:  # such as 1.2.3
        pass
    raise ArgumentError(f"{text!r}: expected {what}.")
