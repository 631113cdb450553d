"""Which ranks there are: the members of a group, which ranks share a host, and who stands at the same place on other hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Members(NamedTuple):
    """The ranks of a group, and what tells the group apart from another one of equal ranks.

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
    """The place of one rank.

    Attributes:
        rank: This rank, 0 … size - 1.
        size: Number of ranks.
        local_rank: This rank among those of its host.
        local_size: Number of ranks on this host.
        cross_rank: This host among the hosts that have a rank of this local rank.
        cross_size: Number of these hosts.
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
        """The place of `rank`, where ``hosts[r]`` is some number of the host that rank r runs on."""
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
