"""Jobs that take turns: whoever is not told to do something sleeps, so that each has the machine to itself.

What a job does stays in it: how it has told the C library to treat memory, which threads it has started, what is in its caches.
"""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.job import Job, JobFailed

_LOOK_SECONDS = 0.5
"""How often, while jobs start, it is looked whether one has ended."""


class Line:
    """A connection between the program that gives turns and one rank: JSON, a line each way."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rw")

    def say(self, what: Any) -> None:
        """Send something."""
        self._file.write(json.dumps(what) + "\n")
        self._file.flush()

    def hear(self) -> Any:
        """What the other end said. Sleeps until then.

        Raises:
            EOFError: It is gone.
        """
        line = self._file.readline()
        if not line:
            raise EOFError
        return json.loads(line)


class Players:
    """Some jobs, each of them one peer.

    Args:
        lines: To each rank, by the job's name.
    """

    def __init__(self, lines: Mapping[str, Sequence[Line]]) -> None:
        self._lines = lines

    def ask(self, name: str, **order: Any) -> list[Any]:
        """Have all ranks of one job do something; their answers, by rank.

        Raises:
            JobFailed: It has ended.
        """
        try:
            for line in self._lines[name]:
                line.say(order)
            return [line.hear() for line in self._lines[name]]
        except (EOFError, OSError):
            raise JobFailed(f"the ranks of {name!r} are gone.") from None


@contextmanager
def players(module: str, ranks: int, settings: Mapping[str, Mapping[str, Any]]) -> Iterator[Players]:
    """Start a job for each name, and end them with the body of the with statement.

    Args:
        module: See `Job`. Its ``measure`` also gets ``address``, and iterates over `orders`.
        ranks: The number of ranks of each job.
        settings: For the name of each job its settings.

    Raises:
        JobFailed: One of them has ended before all were there.
    """
    with ExitStack() as stack:
        address = str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "turns")
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(address)
        server.listen(ranks * len(settings))
        server.settimeout(_LOOK_SECONDS)
        jobs = {
            name: stack.enter_context(Job(module, ranks, {**own, "address": address, "name": name}))
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
        yield Players({name: [lines[name, rank] for rank in range(ranks)] for name in jobs})
        for connection_lines in lines.values():
            connection_lines.say(None)
        for job in jobs.values():
            job.result()


def orders(address: str, name: str, rank: int) -> Iterator[tuple[Line, dict[str, Any]]]:
    """What one rank of a job is told to do, and where to answer. Ends when nothing more is to be done.

    Args:
        address, name: As `measure` got them.
        rank: This rank's number.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        line = Line(connection)
        line.say((name, rank))
        while (order := line.hear()) is not None:
            yield line, order
