"""From the links that were measured to findings about those that are slower than others, or slow for training."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeVar

from hvdlite.tools.advise.link import NetworkLink
from hvdlite.tools.doctor.finding import Finding, warning
from hvdlite.tools.doctor.links import Pair

P = TypeVar("P", Pair, tuple[str, str])

SLOWER = 4.0
"""A link is slow if others carry so many times as much."""
SLOW_NETWORK = 1e9
"""Bits per second, below which whole gradients take longer than most computations."""
LATE = 1e-3
"""The latency in seconds above which small messages count."""


def between_hosts(links: Mapping[Pair, NetworkLink], hosts: Sequence[str]) -> dict[tuple[str, str], NetworkLink]:
    """Return the link from host to host: the fastest that any two ranks of them have had.

    Args:
        links: The links between ranks.
        hosts: For each rank, its host.
    """
    found: dict[tuple[str, str], list[NetworkLink]] = defaultdict(list)
    for (one, other), link in links.items():
        if hosts[one] != hosts[other]:
            found[hosts[one], hosts[other]].append(link)
    return {
        pair: NetworkLink(min(each.latency for each in several), min(each.seconds_per_byte for each in several))
        for pair, several in found.items()
    }


def links(found: Mapping[Pair, NetworkLink], hosts: Sequence[str]) -> Iterator[Finding]:
    """Find links that are slower than others of their kind.

    Args:
        found: The links between ranks.
        hosts: For each rank, its host.
    """
    network = between_hosts(found, hosts)
    slow = _slow(network)
    for sender in dict.fromkeys(one for one, _ in slow):
        to = [other for one, other in slow if one == sender]
        yield _finding(
            f"from {sender} to {', '.join(to)}: {network[sender, to[0]]}",
            f"about {usual(network.values())} as between the other hosts",
            f"look at the cable, the switch and the interface of {sender} (ethtool, ip -s link), or leave it out",
        )
    inside = {pair: link for pair, link in found.items() if hosts[pair[0]] == hosts[pair[1]]}
    for one, other in _slow(inside):
        yield _finding(
            f"from rank {one} to rank {other} on {hosts[one]}: {inside[one, other]}",
            f"about {usual(inside.values())} as between other ranks of a host",
            "look what else runs on their cores, and whether they are on different sockets (lscpu)",
        )
    good = [link for pair, link in network.items() if pair not in slow]
    if good and max(each.bits_per_second for each in good) < SLOW_NETWORK:
        yield warning(
            "slow network",
            f"between the hosts there is {usual(network.values())}",
            f"{SLOW_NETWORK / 1e9:g} Gbit/s or more",
            "choose a faster --network-interface, or send less: hvdlite advise says what that gains",
        )
    elif good and min(each.latency for each in good) > LATE:
        yield warning(
            "slow network",
            f"a message between the hosts takes {1e3 * min(each.latency for each in good):.2g} ms",
            f"less than {1e3 * LATE:g} ms",
            "use hosts that are nearer to each other, or choose another --network-interface",
        )


def _slow(found: Mapping[P, NetworkLink]) -> list[P]:
    if len(found) < 2:
        return []
    limit = SLOWER * usual(found.values()).seconds_per_byte
    return [pair for pair, link in found.items() if link.seconds_per_byte > limit]


def usual(some: Collection[NetworkLink]) -> NetworkLink:
    """Return the link with the lower medians of the latencies and of the seconds for a byte."""
    return NetworkLink(
        statistics.median_low(link.latency for link in some),
        statistics.median_low(link.seconds_per_byte for link in some),
    )


def _finding(found: str, expected: str, do: str) -> Finding:
    return warning("slow link", found, expected, do)
