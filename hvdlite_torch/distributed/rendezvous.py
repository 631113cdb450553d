"""How the ranks of a job find torch's store without MASTER_ADDR: rank 0 makes it, and tells the others by MPI where it is."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

from hvdlite import api
from hvdlite.errors import ArgumentError, CommunicationError, HvdliteError
from hvdlite.launch.job.hosts import address_towards
from hvdlite.launcher_link.link import Address

_CONNECT_SECONDS = 3.0
_OURS = "hvdlite"
"""The scheme of ``init_process_group(init_method="hvdlite://")``."""


def register() -> None:
    """Let ``init_method="hvdlite://"`` and, where no MASTER_ADDR is set, ``env://`` find the ranks of our job."""
    register_rendezvous_handler(_OURS, _meet)
    torchs_own: Any = _rendezvous_handlers["env"]

    def env(url: str, **kwargs: Any) -> Iterator[tuple[Store, int, int]]:
        there = [name in os.environ for name in ("MASTER_ADDR", "MASTER_PORT")]
        if there == [False, True]:  # Accelerate sets the port, and then torch asks for the address
            raise ArgumentError(
                "MASTER_PORT is set and MASTER_ADDR is not. If Accelerate or transformers.Trainer starts torch.distributed, "
                "call hvdlite_torch.accelerate.prepare() before the program makes an Accelerator or TrainingArguments. "
                "Otherwise unset MASTER_PORT, or set both."
            )
        yield from (torchs_own if any(there) else _meet)(url, **kwargs)

    _rendezvous_handlers["env"] = env


def _meet(url: str, timeout: timedelta = timedelta(minutes=30), **_: Any) -> Iterator[tuple[Store, int, int]]:
    api.init()
    query = parse_qs(urlparse(url).query)
    for name, value in (("rank", api.rank()), ("world_size", api.size())):
        given = query.get(name, [str(value)])[0]
        if int(given) not in (value, -1):
            raise ArgumentError(
                f"init_process_group({name}={given}): MPI says that {name} is {value}. Leave the argument out."
            )
    yield _store(timeout), api.rank(), api.size()
    raise HvdliteError("the ranks of a job meet once for each init_process_group.")


def _store(timeout: timedelta) -> Store:
    size = api.size()
    if api.rank() == 0:
        store = TCPStore("127.0.0.1", 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        api.broadcast_object((_own_addresses(), store.port), 0)
        return store
    found: Any = api.broadcast_object(None, 0)
    addresses, port = found
    return TCPStore(_reachable(addresses, port), port, size, is_master=False, timeout=timeout)


def _own_addresses() -> list[str]:
    """Return the addresses of this host under which other ranks may reach it, the likeliest first."""
    if api.local_size() == api.size():
        return ["127.0.0.1"]
    names = [socket.gethostname(), socket.getfqdn()]
    found: list[str] = []
    with suppress(OSError):  # under hvdliterun: all ranks can reach the launcher, and so the address that leads there
        if control := api.world().config.control:
            found.append(address_towards(Address.parse(control).host))
    for name in names:
        with suppress(OSError):
            found += [str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys([*found, *names, "127.0.0.1"]))


def _reachable(addresses: list[str], port: int) -> str:
    """Return the first address that takes a connection."""
    for address in addresses:
        try:
            socket.create_connection((address, port), _CONNECT_SECONDS).close()
        except OSError:
            continue
        return address
    raise CommunicationError(
        f"rank {api.rank()} cannot reach the store of torch.distributed on rank 0: tried {', '.join(addresses)}, port {port}. "
        "Set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE to choose the address."
    )
