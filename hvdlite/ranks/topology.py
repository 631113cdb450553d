"""The ranks of a job: the members of a group, and the position of a rank among the hosts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Members(NamedTuple):
    """The ranks of a group, and a number that tells the group from another one of the same ranks.

    Attributes:
        id: The number of the group. It is the same on all ranks of the group, and a job uses it only once; 0 is the group of
            all ranks of the job.
        ranks: The world ranks of the group, ascending.
    """

    id: int
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)


@dataclass(frozen=True)
class Topology:
    """The position of one rank in its job.

    Attributes:
        rank: The number of the rank, 0 … size - 1.
        size: The number of ranks in the job.
        local_rank: The number of the rank among the ranks of its host, 0 … local_size - 1.
        local_size: The number of ranks on its host.
        cross_rank: The number of its host among the hosts that have a rank with the same local rank, 0 … cross_size - 1.
        cross_size: The number of these hosts.
        is_homogeneous: All hosts have the same number of ranks.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool

    @classmethod
    def of(cls, rank: int, hosts: Sequence[int]) -> Topology:
        """Return the position of `rank` if rank r runs on the host with the number ``hosts[r]``. The numbers are arbitrary."""
        members: dict[int, list[int]] = {}
        for other, host in enumerate(hosts):
            members.setdefault(host, []).append(other)
        local_rank = members[hosts[rank]].index(rank)
        cross = [host for host, ranks in members.items() if len(ranks) > local_rank]
        return cls(
            rank=rank,
            size=len(hosts),
            local_rank=local_rank,
            local_size=len(members[hosts[rank]]),
            cross_rank=cross.index(hosts[rank]),
            cross_size=len(cross),
            is_homogeneous=len({len(ranks) for ranks in members.values()}) == 1,
        )


def has_free_core(local_size: int) -> bool:
    """Return whether each rank of this host can have a second core to itself."""
    return len(os.sched_getaffinity(0)) >= 2 * local_size
