"""What a step with a parameter server costs."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from hvdlite.async_sgd.deal import deal
from hvdlite.tensors.reduction import nbytes_of
from hvdlite.tools.advise.cluster import Cluster
from hvdlite.tools.advise.profile import Profile

_COPIES = 4
"""A rank copies gradients into its push, looks for NaN, and copies values from the answer; a server copies values into it."""


class Costs(NamedTuple):
    """What a step costs.

    Attributes:
        seconds: The seconds of a step, as the mean of the workers.
        nbytes: The bytes that a rank sends to other hosts, as the mean of all ranks.
        exchange: The seconds in which a worker waits for the link.
        workers: The number of ranks that train.
    """

    seconds: float
    nbytes: float
    exchange: float
    workers: int


def cost(profile: Profile, cluster: Cluster, together: bool, count: int) -> Costs:
    """Return what a step costs.

    A worker pushes to all servers at once, and waits for all answers. If all workers push together, the busiest link counts.
    If each has its own pace, it has the links to itself while it pushes, and the slowest thing that all need sets a limit: a
    link, or a server that works for one push after the other.

    Messages in both directions share a link, although TCP could send in both at once: a large message begins when its receiver
    has answered, and this answer waits behind the data that the receiver itself has given to the socket. Collectives begin in
    both directions at once, before there is any. So it was measured with Open MPI.

    Args:
        profile: What was measured.
        cluster: The ranks.
        together: Whether the servers wait for the pushes of all workers.
        count: How many of the last ranks only serve; 0 if each rank has a part and trains.
    """
    everybody = range(cluster.ranks)
    servers, workers = (everybody[-count:], everybody[:-count]) if count else (everybody, everybody)
    layouts = deal([nbytes_of(info) for info in profile.layout], servers)
    leaves, comes = [0.0] * cluster.hosts, [0.0] * cluster.hosts
    far = dict.fromkeys(workers, 0.0)
    for worker in workers:
        for layout in layouts:
            here, there = cluster.host_of(worker), cluster.host_of(layout.server)
            if here != there:
                far[worker] += layout.nbytes
                leaves[here] += layout.nbytes
                comes[there] += layout.nbytes
    nbytes = 2 * sum(leaves) / cluster.ranks  # answers are as long as pushes
    load = [out + back for out, back in zip(leaves, comes, strict=True)]
    update = profile.update / len(servers)
    near = (
        1 - statistics.fmean(far.values()) / profile.nbytes
    )  # the part of a push that is a copy in memory, and so its answer
    local = (_COPIES + 2 * near) * profile.nbytes * cluster.copy
    if together:
        exchange = 2 * cluster.messages(max(load))
        return Costs(profile.compute_together + local + exchange + update, nbytes, exchange, len(workers))
    # A server makes a step for each push. Where it trains too, the steps for all workers take time from its own.
    work = update if count else update * len(workers)
    exchange = 2 * cluster.messages(statistics.fmean(far.values()))
    alone = [profile.compute_apart[worker] + local + exchange + work for worker in workers]
    busiest = cluster.messages(2 * max(load))
    if count:
        busiest += update * len(workers)
    return Costs(max(statistics.harmonic_mean(alone), busiest), nbytes, exchange, len(workers))
