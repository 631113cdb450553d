"""Measures what does not belong to the program: memory, meetings, the link, and the computation of strategies."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hvdlite.algorithms.choose import choose
from hvdlite.algorithms.cost import predict
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.protocols import Collectives, ReduceOp, TensorInfo
from hvdlite.ranks.topology import has_free_core
from hvdlite.tools.advise.link import NetworkLink
from hvdlite.tools.advise.profile import Compressed
from hvdlite.tools.advise.strategies import TrainingStrategy
from hvdlite.tools.advise.trial import AGGREGATORS, try_aggregator, try_halves, try_sharded, try_whole

_SMALL, _LARGEST = 64, 2**26
_ENOUGH_SECONDS = 0.1
"""A message that takes so long is long enough to measure the bandwidth."""


class Measured(NamedTuple):
    """What one rank has measured: attributes of `hvdlite.tools.advise.profile.Profile`."""

    hosts: tuple[int, ...]
    compressed: dict[str, Compressed]
    copy: float
    meeting: float
    link: NetworkLink | None
    spare_core: bool


def measure(
    infos: Sequence[TensorInfo], strategies: Sequence[TrainingStrategy], collectives: HierarchicalCollectives
) -> Measured:
    """Measure on all ranks at once, so that ranks of one host take memory and cores from each other as in a step.

    Args:
        infos: Dtype and shape of each gradient.
        strategies: The strategies whose computation is tried out.
        collectives: The ranks.
    """
    ranks = collectives.size
    hosts = collectives.hosts if collectives.hosts > 1 else ranks
    trials: dict[str, Callable[[], Compressed]] = {
        "gradients": lambda: try_whole(infos, hosts),
        "sharded": lambda: try_sharded(infos, hosts),
        "fp16": lambda: try_halves(infos, hosts),
    }
    for one in strategies:
        if one.kind in AGGREGATORS:
            trials[str(one)] = functools.partial(try_aggregator, one.kind, one.number, infos, ranks)
    found = {}
    for name, trial in trials.items():
        collectives.barrier()
        found[name] = trial()
    copy, meeting, link = measure_hosts(sum(math.prod(info.shape) for info in infos), collectives)
    here = collectives.host.size
    return Measured(tuple(collectives.host_of), found, copy, meeting, link, has_free_core(here))


def measure_hosts(elements: int, collectives: HierarchicalCollectives) -> tuple[float, float, NetworkLink | None]:
    """Measure memory, meetings and the link, on all ranks at once.

    Args:
        elements: The number of parameters.
        collectives: The ranks.

    Returns:
        The seconds to copy a byte, the seconds of a meeting of the ranks of a host, and the link between the hosts, which is
        None on one host.
    """
    collectives.barrier()
    copy = _seconds_to_copy(elements)
    collectives.barrier()
    meeting = _median(collectives.host.meet, 50)
    own = collectives.duplicate()
    link = None if own.between_hosts is None else measure_link(own.between_hosts, own.owners)
    own.barrier()
    own.close()
    return copy, meeting, link


def slowest(everybody: Sequence[Measured]) -> Measured:
    """Return what counts for a step in which all ranks wait for the slowest."""
    links = [each.link for each in everybody if each.link is not None]
    return Measured(
        everybody[0].hosts,
        {
            name: Compressed(max(each.compressed[name].seconds for each in everybody), first.exchanges)
            for name, first in everybody[0].compressed.items()
        },
        max(each.copy for each in everybody),
        max(each.meeting for each in everybody),
        max(links, key=lambda link: link.seconds_per_byte, default=None),
        all(each.spare_core for each in everybody),
    )


def measure_link(cross: Collectives, flows: int) -> NetworkLink:
    """Measure latency and bandwidth between hosts by sums of short and of long vectors. All ranks of all hosts call this.

    Args:
        cross: A rank of each host.
        flows: How many such groups measure at once, and share the links.
    """
    small = np.zeros(_SMALL // 4, np.float32)
    one = _median(lambda: cross.allreduce(small, ReduceOp.SUM), 50)
    latency = one / predict(choose(cross.size, _SMALL), cross.size, 0.0, 1.0, 0.0, 0.0)
    nbytes = 2**18
    while True:
        data = np.zeros(nbytes // 4, np.float32)
        # Over TCP two ranks now and then send in turns, and not at once. So the shortest time is that of the link.
        times = _times(lambda: cross.allreduce(data, ReduceOp.SUM), 5)  # noqa: B023  # it is called here
        seconds = np.array([min(times)])
        cross.allreduce(seconds, ReduceOp.MAX)  # so that all ranks go on, or none
        if seconds[0] >= _ENOUGH_SECONDS or nbytes >= _LARGEST:
            break
        nbytes *= 2
    name = choose(cross.size, nbytes)
    steps = predict(name, cross.size, 0.0, latency, 0.0, 0.0)
    per_byte = predict(name, cross.size, nbytes, 0.0, 1.0, 0.0)
    return NetworkLink(latency, max(float(seconds[0]) - steps, 1e-12) / per_byte / flows)


def _seconds_to_copy(elements: int) -> float:
    """Return the seconds to copy a byte, of as many float32 as there are parameters, but not of very many."""
    # Zeros that nobody has written are all one page, which stays in the cache.
    source = np.ones(min(max(elements, 2**14), 2**24), np.float32)
    into = np.empty_like(source)
    return _median(lambda: np.copyto(into, source), 7) / source.nbytes


def _median(call: Callable[[], object], times: int) -> float:
    """Return the median time of some calls. The first call is left out."""
    return statistics.median(_times(call, times))


def _times(call: Callable[[], object], times: int) -> list[float]:
    """Return the times of some calls. The first call is left out."""
    call()
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return found
