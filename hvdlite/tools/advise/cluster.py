"""`Cluster`: what copies, meetings and messages cost between ranks, some of which share a host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hvdlite.tools.advise.exchanges import ExchangeCost
from hvdlite.tools.advise.link import NetworkLink


@dataclass(frozen=True)
class Cluster:
    """Hosts with equally many ranks. Ranks of a host share memory, and each host has one link to all others.

    Attributes:
        hosts: The number of hosts.
        per_host: The number of ranks of each.
        link: The link of each host, as collectives use it; None if there is one host.
        plain: The same link, as messages between two ranks use it.
        copy: The seconds to copy a byte in memory.
        meeting: The seconds of a meeting of the ranks of a host.
    """

    hosts: int
    per_host: int
    link: NetworkLink | None
    plain: NetworkLink | None
    copy: float
    meeting: float

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.hosts * self.per_host

    @property
    def others(self) -> float:
        """The part of its gradients that a rank of a host does not sum by itself."""
        return (self.per_host - 1) / self.per_host

    def host_of(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return rank // self.per_host

    def meetings(self, count: int) -> float:
        """Return the seconds of so many meetings of the ranks of a host."""
        return count * self.meeting if self.per_host > 1 else 0.0

    def between(self, exchanges: Iterable[ExchangeCost]) -> tuple[float, float]:
        """Return the seconds of exchanges between the hosts, one after the other, and the bytes that a rank sends in them."""
        if self.link is None:
            return 0.0, 0.0
        each = [(one.seconds(self.hosts, self.link), one.sent(self.hosts)) for one in exchanges]
        return sum(seconds for seconds, _ in each), sum(sent for _, sent in each) / self.per_host

    def messages(self, nbytes: float) -> float:
        """Return the seconds until messages with so many bytes in all have passed a link, sent at once."""
        return 0.0 if self.plain is None else self.plain.latency + nbytes * self.plain.seconds_per_byte
