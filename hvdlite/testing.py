"""Tests of programs that use hvdlite can run ranks as threads of one process: without MPI, and within milliseconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hvdlite.api import in_world
from hvdlite.comm.local import LocalFabric, LocalTransport, Network
from hvdlite.comm.point_to_point import PointToPointCollectives
from hvdlite.config import Config
from hvdlite.errors import HvdliteError
from hvdlite.runtime.world import World

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
    """Call ``fn(*args)`` on n ranks at once. Each rank is a thread in which the functions of `hvdlite` work as after `init`.

    Args:
        n: The number of ranks.
        fn: The function that each rank calls.
        args: The arguments of the function, the same on every rank.
        hosts: For each rank, the number of its pretended host; by default all ranks are on one host.
        network: A simulated network between the ranks (see `Network`); an ideal one by default.
        config: The settings of the ranks; by default the default settings, whatever the environment says.
        timeout: Seconds after which all ranks are given up.

    Returns:
        What the function returned on each rank, by rank.

    Raises:
        TimeoutError: Some ranks were not done in time. The text names them.
        Exception: The exception that `fn` raised on the rank that failed first. The other ranks are stopped.

    Examples:
        >>> on_ranks(2, lambda: hvdlite.allreduce(np.array([1.0]), hvdlite.Sum).item())
        [2.0, 2.0]
    """
    hosts = [0] * n if hosts is None else list(hosts)
    fabric = LocalFabric(n, network, hosts)

    def work(transport: LocalTransport) -> T:
        def end_job(text: str) -> None:
            fabric.abort(transport.rank, HvdliteError(text))

        settings = config or Config()
        if network is not None:  # then all communication goes over the simulated network
            settings = dataclasses.replace(settings, shared_memory=False)
        here = World(transport, PointToPointCollectives, hosts, settings, end_job)
        try:
            with in_world(here):
                result = fn(*args)
            here.shutdown()
        finally:
            here.abandon()
        return result

    return fabric.run(work, timeout)
