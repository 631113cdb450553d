"""`Heard`: what the ranks have said so far, and what it means. A job may end at any moment, and this is what is known then."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hvdlite.tools.advise.link import NetworkLink
from hvdlite.tools.doctor import rules
from hvdlite.tools.doctor.facts import HostFacts, MpiFacts, RankFacts
from hvdlite.tools.doctor.finding import Finding
from hvdlite.tools.doctor.links import Pair

_MARK = "hvdlite-doctor "


def line_of(kind: str, value: Any) -> str:
    """Return the line in which a rank says a word on its stdout."""
    return f"{_MARK}{json.dumps([kind, value])}\n"


def word_in(line: str) -> tuple[str, Any] | None:
    """Return the word in a line that a rank has printed; None if the line is something else."""
    if not line.startswith(_MARK):
        return None
    kind, value = json.loads(line.removeprefix(_MARK))
    return kind, value


class Heard:
    """Collects the words of the ranks.

    Attributes:
        hosts: What each rank sees of its host, by rank.
        mpi: What each rank sees of MPI, by rank.
        ranks: What each rank has measured with the others, by rank.
        links: The links between ranks; empty as long as they were not measured.
        tried: The operations that were run.
        failed: For each rank, the operations that have failed there, and why.
        step: What was measured of a model that is made up; None if that was not done.
        stage: What the ranks were doing last.
        done: How many ranks have come to the end.
        count: How many words were taken.
        printed: What the job has printed to stderr.
    """

    def __init__(self) -> None:
        self.hosts: dict[int, HostFacts] = {}
        self.mpi: dict[int, MpiFacts] = {}
        self.ranks: dict[int, RankFacts] = {}
        self.links: dict[Pair, NetworkLink] = {}
        self.tried: list[str] = []
        self.failed: dict[int, dict[str, str]] = {}
        self.step: dict[str, Any] | None = None
        self.stage = ""
        self.done = self.count = 0
        self.printed = ""
        self._broken: dict[str, dict[str, str]] = {}

    def take(self, kind: str, value: Any) -> None:
        """Take a word of a rank, as `hvdlite.tools.doctor.probe.examine` says it."""
        self.count += 1
        if kind == "stage":
            self.stage = value
        elif kind == "host":
            host = HostFacts.unpack(value)
            self.hosts[host.rank or 0] = host
        elif kind == "broken":
            self._broken[value["host"]] = value["packages"]
        elif kind == "mpi":
            mpi = MpiFacts.unpack(value)
            self.mpi[mpi.rank] = mpi
        elif kind == "rank":
            rank = RankFacts.unpack(value)
            self.ranks[rank.rank] = rank
        elif kind == "links":
            self.links = {(one, other): NetworkLink(latency, beta) for one, other, latency, beta in value}
        elif kind == "operations":
            self.tried = value["tried"]
            self.failed[value["rank"]] = value["failed"]
        elif kind == "step":
            self.step = value
        elif kind == "done":
            self.done += 1

    @property
    def names(self) -> list[str]:
        """For each rank that has measured with the others, its host."""
        return [self.ranks[rank].host for rank in sorted(self.ranks)]

    @property
    def nodes(self) -> list[int]:
        """For each rank that has measured with the others, a number of its host."""
        return [self.ranks[rank].node for rank in sorted(self.ranks)]

    def findings(self, here: HostFacts | None = None, size: int = 1, parameters: float = 0) -> Iterator[Finding]:
        """Return what is found in all that was said.

        Args:
            here: What the command sees of this machine; it counts if no rank has said anything, and for broken packages.
            size: The number of ranks of the job.
            parameters: The number of parameters of the model; 0 if it is not known.
        """
        hosts = [self.hosts[rank] for rank in sorted(self.hosts)] or ([here] if here is not None else [])
        broken = {**({here.host: dict(here.broken)} if here is not None else {}), **self._broken}
        hosts = [replace(each, broken={**each.broken, **broken.get(each.host, {})}) for each in hosts]
        yield from rules.mpi(list(self.mpi.values()))
        yield from rules.hosts(hosts, size, parameters)
        yield from rules.ranks(list(self.ranks.values()))
        yield from rules.operations(self.failed)
        if self.links:
            yield from rules.links(self.links, self.names)
