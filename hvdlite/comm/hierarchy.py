"""Where the ranks of a group stand: who shares memory with whom, and who speaks for whom between the hosts.

Two hosts, of three and two ranks. The first m ranks of each host are its owners, m being the size of the smallest host.
What a host has to say is cut into m slices; slice i is exchanged among the ranks numbered i of all hosts::

    host 0:   rank 0   rank 1   rank 2          m = 2: ranks 0 and 1 of each host are owners
                 │        │
    host 1:   rank 0   rank 1                   two cross groups, drawn as │
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hvdlite.comm.host import Host
from hvdlite.comm.shared_memory import SharedMemoryError
from hvdlite.protocols import Collectives, ReduceOp, Transport

MakeCollectives = Callable[[Transport], Collectives]


class Position(NamedTuple):
    """Where a rank stands."""

    host: int
    number: int
    """Among the ranks of its host."""


class HostHierarchy:
    """The layers above and below one rank. All ranks of the group make one.

    Args:
        transport: Over the group; only used here.
        hosts: For each rank of the group, some number of its host.
        make_flat: Makes collectives over the ranks of a transport.
        shared_memory: Whether ranks of one host may share memory; if not, or if they cannot, each rank is taken for a
            host of its own.

    Attributes:
        host: The ranks of this host.
        places: Where each rank of the group stands.
        owners: The number of ranks of each host that have a slice.
        cross: Collectives over the ranks of this number on all hosts (`peers`); None if there is one host only, or this rank
            is no owner.
    """

    def __init__(
        self, transport: Transport, hosts: Sequence[int], make_flat: MakeCollectives, shared_memory: bool = True
    ) -> None:
        if not shared_memory:
            hosts = range(transport.size)
        host = _meet_host(transport, hosts, make_flat)
        if host is None:
            hosts = range(transport.size)
            host = Host(transport.subgroup([transport.rank]))
        self.host = host
        self.places = _places(hosts)
        sizes = np.bincount([place.host for place in self.places])
        self.owners = int(sizes.min())
        self.hosts = len(sizes)
        self.cross: Collectives | None = None
        mine = self.places[transport.rank]
        if self.hosts > 1 and mine.number < self.owners:
            self.cross = make_flat(transport.subgroup(self.peers(transport.rank)))

    def peers(self, rank: int) -> list[int]:
        """The ranks of the group that are numbered like `rank` on their hosts, itself too, ascending."""
        number = self.places[rank].number
        return [other for other, place in enumerate(self.places) if place.number == number]

    def close(self) -> None:
        """Release everything. Local."""
        self.host.close()
        if self.cross is not None:
            self.cross.close()


def _places(hosts: Sequence[int]) -> list[Position]:
    order: dict[int, int] = {}
    seats: list[int] = []
    places = []
    for host in hosts:
        index = order.setdefault(host, len(order))
        if index == len(seats):
            seats.append(0)
        places.append(Position(index, seats[index]))
        seats[index] += 1
    return places


def _meet_host(transport: Transport, hosts: Sequence[int], make_flat: MakeCollectives) -> Host | None:
    """The ranks of this rank's host, or None on all ranks if those of some host cannot share memory."""
    host, problem = None, ""
    neighbours = [rank for rank, other in enumerate(hosts) if other == hosts[transport.rank]]
    try:
        host = Host(transport.subgroup(neighbours))
    except SharedMemoryError as error:
        problem = str(error)
    able = np.array([host is not None], np.int64)
    if 1 < len(set(hosts)) < transport.size:  # those of another host may have failed
        check = make_flat(transport.duplicate())
        check.allreduce(able, ReduceOp.MIN)
        check.close()
    if able[0]:
        return host
    if host is not None:
        host.close()
    if problem and transport.rank == neighbours[0]:
        warnings.warn(
            f"{problem} Messages are used in its place, which is slower. HVDLITE_SHARED_MEMORY=0 says so in advance.",
            RuntimeWarning,
            stacklevel=2,
        )
    return None
