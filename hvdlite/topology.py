"""The ranks of a group and their hosts: the members of a group, and the position of one rank on its host and between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Members(NamedTuple):
    """The ranks of a group, and its number, which tells it apart from another group of equal ranks.

    Attributes:
        id: The number of the group, the same on all its ranks and never used twice in a job: 0 for all ranks of the job.
        ranks: The world ranks, ascending.
    """

    id: int
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)


@dataclass(frozen=True)
class Topology:
    """The position of one rank: in the job, on its host, and between the hosts.

    Attributes:
        rank: The number of the rank, from 0 to ``size - 1``.
        size: The number of ranks.
        local_rank: The number of the rank among the ranks of its host, from 0.
        local_size: The number of ranks on this host.
        cross_rank: The number of this host among the hosts that have a rank with this local rank.
        cross_size: The number of these hosts.
        is_homogeneous: True if all hosts have the same number of ranks.
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
        """Return the position of `rank`. ``hosts[r]`` is a number of the host on which rank r runs."""
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
