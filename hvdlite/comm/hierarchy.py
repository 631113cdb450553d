"""The two levels of a group: the ranks of one host share memory, and slice owners exchange data between the hosts.

The picture shows two hosts, of three and two ranks. Let m be the size of the smallest host: the first m ranks of each host are
its slice owners. The data of a host is cut into m slices. Slice i is exchanged among the ranks with number i of all hosts::

    host 0:   rank 0   rank 1   rank 2          m = 2: ranks 0 and 1 of each host are owners
                 │        │
    host 1:   rank 0   rank 1                   two inter-host groups, drawn as │
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
    """The position of a rank in the hierarchy."""

    host: int
    """The number of its host: hosts are counted in the order in which the ranks of the group name them."""
    number: int
    """Its number among the ranks of its host, from 0."""


class HostHierarchy:
    """The intra-host and the inter-host group of one rank. All ranks of the group make one.

    Args:
        transport: A transport over the group. The constructor uses it; the object does not keep it.
        hosts: For each rank of the group, a number of its host.
        make_flat: A function that makes collectives over the ranks of a transport.
        shared_memory: Whether the ranks of one host may share memory. If not, or if they cannot, each rank counts as a host of
            its own.

    Attributes:
        host: The ranks of this rank's host.
        hosts: The number of hosts.
        positions: The position of each rank of the group.
        owners: The number of slice owners on each host.
        inter_host: Collectives over the `peers` of this rank; None if there is one host only, or this rank owns no slice.
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
        self.positions = _positions(hosts)
        sizes = np.bincount([position.host for position in self.positions])
        self.owners = int(sizes.min())
        self.hosts = len(sizes)
        self.inter_host: Collectives | None = None
        mine = self.positions[transport.rank]
        if self.hosts > 1 and mine.number < self.owners:
            self.inter_host = make_flat(transport.subgroup(self.peers(transport.rank)))

    def peers(self, rank: int) -> list[int]:
        """Return the ranks of the group that have the same number on their hosts as `rank`: `rank` too, ascending."""
        number = self.positions[rank].number
        return [other for other, position in enumerate(self.positions) if position.number == number]

    def close(self) -> None:
        """Release everything. This does not wait for other ranks."""
        self.host.close()
        if self.inter_host is not None:
            self.inter_host.close()


def _positions(hosts: Sequence[int]) -> list[Position]:
    order: dict[int, int] = {}
    seats: list[int] = []
    positions = []
    for host in hosts:
        index = order.setdefault(host, len(order))
        if index == len(seats):
            seats.append(0)
        positions.append(Position(index, seats[index]))
        seats[index] += 1
    return positions


def _meet_host(transport: Transport, hosts: Sequence[int], make_flat: MakeCollectives) -> Host | None:
    """Return the ranks of this rank's host. Return None on all ranks if the ranks of some host cannot share memory."""
    host, problem = None, ""
    neighbours = [rank for rank, other in enumerate(hosts) if other == hosts[transport.rank]]
    try:
        host = Host(transport.subgroup(neighbours))
    except SharedMemoryError as error:
        problem = str(error)
    able = np.array([host is not None], np.int64)
    if 1 < len(set(hosts)) < transport.size:  # sharing may have failed on another host
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
