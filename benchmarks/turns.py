"""Lets several jobs take turns. A job without an order sleeps, so that the job with the turn has the machine to itself.

Separate jobs do not influence each other by their malloc settings, their threads or their caches.
"""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.job import Job, JobFailed

_LOOK_SECONDS = 0.5
"""While jobs start, the seconds between two checks whether a job has ended."""

_TRACEBACK_SECONDS = 10.0
"""How long a job that has lost a rank may take to end by itself."""


class Line:
    """A connection between the program that gives orders and one rank. Each message is a line of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rw")

    def say(self, what: Any) -> None:
        """Send an object that is valid in JSON."""
        self._file.write(json.dumps(what) + "\n")
        self._file.flush()

    def hear(self) -> Any:
        """Wait for a message of the other end, and return it.

        Raises:
            EOFError: The other end has closed the connection.
        """
        line = self._file.readline()
        if not line:
            raise EOFError
        return json.loads(line)


class Players:
    """Several jobs, each of which is one peer.

    Args:
        lines: The connections to the ranks of each job, by the job's name.
        jobs: The jobs.
    """

    def __init__(self, lines: Mapping[str, Sequence[Line]], jobs: Mapping[str, Job]) -> None:
        self._lines, self._jobs = lines, jobs

    def ask(self, name: str, **order: Any) -> list[Any]:
        """Give an order to all ranks of one job, and return their answers by rank.

        Raises:
            JobFailed: The job has ended.
        """
        try:
            for line in self._lines[name]:
                line.say(order)
            return [line.hear() for line in self._lines[name]]
        except (EOFError, OSError):
            with suppress(JobFailed):
                self._jobs[name].result(_TRACEBACK_SECONDS)  # it prints the traceback before it ends
            raise JobFailed(f"the ranks of {name!r} are gone.") from None


@contextmanager
def players(
    module: str, ranks: int, settings: Mapping[str, Mapping[str, Any]], roots: Mapping[str, Path] = MappingProxyType({})
) -> Iterator[Players]:
    """Start a job for each name. The jobs end with the body of the with statement.

    Args:
        module: The module of each `Job`. Its ``measure`` also gets ``address`` and ``name``, and iterates over `orders`.
        ranks: The number of ranks of each job.
        settings: The settings of each job, by name.
        roots: The root of a job that runs in another tree, by name: see `Job`.

    Raises:
        JobFailed: A job has ended before all jobs were ready, or has failed at the end.
    """
    with ExitStack() as stack:
        address = str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "turns")
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(address)
        server.listen(ranks * len(settings))
        server.settimeout(_LOOK_SECONDS)
        jobs = {
            name: stack.enter_context(
                Job(module, ranks, {**own, "address": address, "name": name}, root=roots.get(name))
            )
            for name, own in settings.items()
        }
        lines: dict[tuple[str, int], Line] = {}
        while len(lines) < ranks * len(jobs):
            try:
                connection, _ = server.accept()
            except TimeoutError:
                for name, job in jobs.items():
                    if job.ended:
                        raise JobFailed(f"the ranks of {name!r} did not begin.") from None
                continue
            connection.settimeout(None)
            line = Line(stack.enter_context(connection))
            name, rank = line.hear()
            lines[name, rank] = line
        yield Players({name: [lines[name, rank] for rank in range(ranks)] for name in jobs}, jobs)
        for connection_lines in lines.values():
            connection_lines.say(None)
        for job in jobs.values():
            job.result()


def orders(address: str, name: str, rank: int) -> Iterator[tuple[Line, dict[str, Any]]]:
    """Yield the connection for the answer and the order, for each order to one rank of a job, until there are no more orders.

    Args:
        address: The ``address`` that ``measure`` got.
        name: The name of the job.
        rank: The rank of this process.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        line = Line(connection)
        line.say((name, rank))
        while (order := line.hear()) is not None:
            yield line, order
