"""Ranks as threads of one process: no MPI, no processes, milliseconds. For tests of programs that use hvdlite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hvdlite.api import in_world
from hvdlite.comm.local import LocalFabric, LocalTransport, Network
from hvdlite.comm.point_to_point import PointToPointCollectives
from hvdlite.config import Config
from hvdlite.errors import HvdliteError
from hvdlite.world import World

__all__ = ["LocalFabric", "LocalTransport", "Network", "on_ranks"]

T = TypeVar("T")


def on_ranks(
    n: int,
    fn: Callable[..., T],
    *args: Any,
    hosts: Sequence[int] | None = None,
    network: Network | None = None,
    config: Config | None = None,
    timeout: float = 60.0,
) -> list[T]:
    """Call ``fn(*args)`` on n ranks at once, each a thread in which the functions of `hvdlite` work as after `init`.

    Args:
        n: The number of ranks.
        fn: What a rank does.
        args: Its arguments, the same on every rank.
        hosts: For each rank, the number of its pretended host; one host by default.
        network: A simulated network between the ranks (see `Network`); an ideal one by default.
        config: Settings; the defaults, whatever the environment says.
        timeout: Seconds after which all ranks are given up.

    Returns:
        What each rank returned, by rank.

    Raises:
        TimeoutError: Some ranks were not done; the text says which.
        Exception: What `fn` raised on the rank that failed first. The others are stopped.
    """
    places = [0] * n if hosts is None else list(hosts)
    fabric = LocalFabric(n, network, places)

    def work(transport: LocalTransport) -> T:
        def end_job(text: str) -> None:
            fabric.abort(transport.rank, HvdliteError(text))

        settings = config or Config()
        if network is not None:  # all that the ranks say to each other is to take its time
            settings = dataclasses.replace(settings, shared_memory=False)
        here = World(transport, PointToPointCollectives, places, settings, end_job)
        try:
            with in_world(here):
                result = fn(*args)
            here.shutdown()
        finally:
            here.abandon()
        return result

    return fabric.run(work, timeout)
