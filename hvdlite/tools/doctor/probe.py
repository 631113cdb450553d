"""What each rank runs: it observes, then measures together with the others, and says at once what it has.

hvdliterun starts it (`hvdlite.tools.doctor.rank`). If somebody else has started the ranks, it runs in them
(`hvdlite.tools.doctor.inside`).
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hvdlite.comm.mpi.start import start_mpi
from hvdlite.comm.shared_memory import SharedMemoryError, share
from hvdlite.config import Config, environment
from hvdlite.errors import WorldSizeError
from hvdlite.launch.worker.rank_environment import find_local_rank
from hvdlite.protocols import Transport
from hvdlite.ranks.process_set import ProcessSet
from hvdlite.timeline.clocks import Clock, share_texts
from hvdlite.timeline.clocks import measure as measure_clock
from hvdlite.tools.doctor.facts import MpiFacts, Plain, RankFacts
from hvdlite.tools.doctor.imports import broken_imports
from hvdlite.tools.doctor.links import chosen, measure_links
from hvdlite.tools.doctor.observe import observe, watch

WATCH_SECONDS, _SETTLE_SECONDS = 0.5, 0.05
_WARM_UP, _FEWEST_STEPS, _MOST_STEPS, _CHECK_SECONDS = 3, 5, 20, 10.0
_LONGEST_EXCHANGE = 3.0
"""Of a larger model, so much is exchanged in a step as takes so many seconds."""
_SMALLER, _PAUSE = 2, 0.05
"""Memory and the link are measured by exchanges of a model that is so many times smaller, each after a pause of some seconds,
as a computation makes one. They take turns with the steps, so whatever else runs on the hosts slows both down."""
_TENSOR = 2**20
"""The elements of a tensor of the model that is made up."""

Say = Callable[[str, Any], None]
"""Takes a word of this rank: its kind, and what can become JSON."""


@dataclass(frozen=True)
class ProbeRequest(Plain):
    """What the ranks are asked to do.

    Attributes:
        here: The host on which packages were tried already; empty for none.
        imports: Whether to try the packages of other hosts.
        links: Whether to measure links.
        operations: Whether to run the operations.
        parameters: The number of parameters of the model whose step is checked; 0 for none.
        step_seconds: The seconds that its step computes.
    """

    here: str = ""
    imports: bool = True
    links: bool = True
    operations: bool = True
    parameters: int = 0
    step_seconds: float = 0.0


def examine(say: Say, request: ProbeRequest) -> None:
    """Observe and measure. All ranks call this.

    Args:
        say: Takes what this rank has found, as soon as it has.
        request: What to do.

    Raises:
        Exception: MPI cannot be started, or the ranks cannot go on. What was found before has been said.
    """
    say("stage", "looking at the hosts")
    facts = observe()
    say("host", facts.pack())
    if request.imports and facts.host != request.here and find_local_rank(environment()) in (None, 0):
        say("broken", {"host": facts.host, "packages": broken_imports()})
    say("stage", "starting MPI")
    if not start_mpi():
        return
    mpi = _ask_mpi(facts.host)
    say("mpi", mpi.pack())
    if mpi.alone or mpi.threads != "MULTIPLE":
        return
    from hvdlite.comm.mpi.job import connect

    transport, nodes = connect()
    say("rank", together(transport, nodes, facts.host, say).pack())
    if request.links:
        _measure_links(transport, nodes, say)
    transport.close()
    if request.operations or request.parameters:
        _train(say, request)
    say("done", None)


def _ask_mpi(host: str) -> MpiFacts:
    from mpi4py import MPI

    from hvdlite.comm.mpi.job import check_world_size

    levels = {getattr(MPI, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
    library = " ".join(MPI.Get_library_version().split("\0")[0].splitlines()[0].split(",")[0].split())
    rank, size, alone = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), ""
    try:
        check_world_size(size, environment(), library)
    except WorldSizeError as error:
        alone = str(error)
    return MpiFacts(host, rank, size, library, levels[MPI.Query_thread()], alone)


def together(transport: Transport, nodes: Sequence[int], host: str, say: Say, clock: Clock = time.time_ns) -> RankFacts:
    """Share memory, watch the host while no rank works, and compare clocks. All ranks call this.

    Args:
        transport: The transport over all ranks. Nothing else may be sent on it meanwhile.
        nodes: For each rank, a number of its host.
        host: The host's name.
        say: Takes what this rank does.
        clock: Returns the time in nanoseconds.
    """
    say("stage", "sharing memory")
    neighbours = [rank for rank, node in enumerate(nodes) if node == nodes[transport.rank]]
    part = transport.subgroup(neighbours)
    unshared = "" if Config.from_env().shared_memory else "HVDLITE_SHARED_MEMORY=0"
    if not unshared:
        try:
            share(part, 4096)
        except SharedMemoryError as error:
            unshared = str(error)
    part.close()
    say("stage", "watching the cores")
    share_texts(transport, "")  # all ranks are here
    time.sleep(_SETTLE_SECONDS)
    busy: dict[str, float] = {}
    programs: tuple[tuple[int, str, float], ...] = ()
    if transport.rank == neighbours[0]:
        busy, programs = watch(WATCH_SECONDS, ())
    else:
        time.sleep(WATCH_SECONDS + _SETTLE_SECONDS)
    say("stage", "comparing clocks")
    offset = measure_clock(transport, clock)
    share_texts(transport, "")
    return RankFacts(
        transport.rank,
        host,
        nodes[transport.rank],
        unshared,
        busy,
        programs,
        -offset.offset / 1e9,
        offset.error / 1e9,
    )


def _measure_links(transport: Transport, nodes: Sequence[int], say: Say) -> None:
    say("stage", "measuring links")

    def progress(pair: tuple[int, int], done: int, count: int) -> None:
        say("stage", f"measuring the link between ranks {pair[0]} and {pair[1]} ({done + 1} of {count})")

    found = measure_links(transport, chosen(nodes), progress)
    if transport.rank == 0:
        links = [[*pair, link.latency, link.seconds_per_byte] for pair, link in found.items()]
        say("links", links)


def _train(say: Say, request: ProbeRequest) -> None:
    from hvdlite import api
    from hvdlite.tools.doctor.operations import OPERATIONS, try_operations

    api.init()
    failed: dict[str, str] = {}
    if request.operations:
        failed = try_operations(lambda name: say("stage", f"trying operations ({name})"))
        say("operations", {"rank": api.rank(), "tried": list(OPERATIONS), "failed": failed})
    if request.parameters and not failed:
        _step(say, request)
    api.shutdown()


def _step(say: Say, request: ProbeRequest) -> None:
    """Measure the hosts, and the step of a model that is made up."""
    from hvdlite import api
    from hvdlite.operations import Agreement
    from hvdlite.tools.advise.calibrate import measure_hosts

    say("stage", "measuring memory and the link between hosts")
    elements, engine = request.parameters, api.world().groups.everybody.engine
    agreed = [("parameters", elements)]
    copy, meeting, link = engine.run(Agreement("hvdlite doctor", agreed, functools.partial(measure_hosts, elements)))
    # Over a slow link a whole model would take minutes.
    fits = elements if link is None else min(elements, int(_LONGEST_EXCHANGE / (2 * 4 * link.seconds_per_byte)))
    checked = max(1, min(api.allgather_object(fits)))
    smaller = max(1, checked // _SMALLER)
    neighbours = _neighbours()
    here = neighbours.size() or 1
    exchange = _LONGEST_EXCHANGE if checked < elements else 0.0
    steps = max(_FEWEST_STEPS, min(_MOST_STEPS, int(_CHECK_SECONDS / max(request.step_seconds + exchange, 1e-3))))
    inside = _exchanger(max(1, elements // _SMALLER), neighbours) if here > 1 else None
    between = None if link is None else _exchanger(smaller)
    whole = _exchanger(checked)
    insides, betweens, times = [], [], []
    for number in range(_WARM_UP + steps):
        say("stage", f"checking the prediction (step {number + 1} of {_WARM_UP + steps})")
        if inside is not None:
            insides.append(_timed(_PAUSE, inside)[1])
        if between is not None:
            betweens.append(_timed(_PAUSE, between)[1])
        times.append(sum(_timed(request.step_seconds, whole)))
    if insides:
        # Sums take longer than copies, and ranks of a host take the memory's bandwidth from each other.
        copies = (
            3 * (here - 1) / here
        )  # in an exchange within a host, as hvdlite.tools.advise.model.CostModel counts them
        seconds = max(_usual(insides) - 2 * meeting, 1e-9)
        copy = seconds / (copies * 4 * max(1, elements // _SMALLER))
    mine = {
        "copy": copy,
        "meeting": meeting,
        "link": None if link is None else asdict(link),
        "seconds": _usual(times),
        "smaller_seconds": _usual(betweens) if betweens else 0.0,
    }
    everybody: list[dict[str, Any]] = api.allgather_object(mine)
    if api.rank() == 0:
        links = [each["link"] for each in everybody if each["link"] is not None]
        slowest = {
            name: max(each[name] for each in everybody) for name in ("copy", "meeting", "seconds", "smaller_seconds")
        }
        say(
            "step",
            {
                **slowest,
                "parameters": checked,
                "smaller": smaller,
                "link": max(links, key=lambda each: each["seconds_per_byte"], default=None),
            },
        )


def _neighbours() -> ProcessSet:
    """Return the ranks of this rank's host, as a group for their own exchanges. All ranks call this."""
    from hvdlite import api

    hosts = api.world().hosts
    members = {host: [rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)}
    groups = {host: api.new_group(ranks) for host, ranks in members.items()}
    return groups[hosts[api.rank()]]


def _exchanger(elements: int, process_set: ProcessSet | None = None) -> Callable[[], object]:
    """Return a function that exchanges the gradients of a model among some ranks, or all."""
    from hvdlite.adapter.distributed_gradient import DistributedGradient

    combine = DistributedGradient(process_set=process_set, inplace=True)
    gradients = [np.ones(length, np.float32) for length in tensors(elements)]
    return lambda: combine(gradients)


def _timed(pause: float, exchange: Callable[[], object]) -> tuple[float, float]:
    """Sleep, then exchange. Return the seconds of both."""
    began = time.perf_counter()
    time.sleep(pause)
    middle = time.perf_counter()
    exchange()
    return middle - began, time.perf_counter() - middle


def _usual(times: Sequence[float]) -> float:
    return statistics.median(times[_WARM_UP:])


def tensors(elements: int) -> list[int]:
    """Return the lengths of the tensors of a model that is made up."""
    whole, rest = divmod(elements, _TENSOR)
    return [_TENSOR] * whole + [rest] * (rest > 0)
