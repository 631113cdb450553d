"""Starts gloo and Horovod in the processes in which hvdlite runs."""

from __future__ import annotations

import importlib.util
import os
import socket
from types import ModuleType

import torch.distributed
from mpi4py import MPI

NO_HOROVOD = "Horovod cannot be imported here"


def start_gloo() -> None:
    """Start torch.distributed with gloo on the loopback interface. Rank 0 chooses a free port."""
    comm = MPI.COMM_WORLD
    address = None
    if comm.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
    host, port = comm.bcast(address)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", f"tcp://{host}:{port}", rank=comm.rank, world_size=comm.size)


def start_horovod() -> ModuleType | None:
    """Initialise Horovod and return its torch module; return None if Horovod is not installed."""
    if importlib.util.find_spec("horovod") is None:
        return None
    # Horovod's thread looks for work once per cycle (1 ms by default), so a blocking call waits for half a cycle.
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "0.1")
    horovod: ModuleType = importlib.import_module("horovod.torch")
    horovod.init()
    return horovod
