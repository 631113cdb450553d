"""MPI fails on rank 1 while the ranks negotiate an operation."""

from typing import Any

import numpy as np
from mpi4py import MPI

import hvdlite as hvd
from hvdlite.api import world
from hvdlite.comm.mpi.transport import MpiTransport


class Broken:
    """A communicator that passes all calls on to another one, except calls for messages, which fail."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> object:
        if name in ("Isend", "Improbe"):
            raise MPI.Exception(MPI.ERR_OTHER)
        return getattr(self._comm, name)


hvd.init()
hvd.allreduce(np.ones(3), name="right")
if hvd.rank() == 1:
    transport = world().engine()._transport
    assert isinstance(transport, MpiTransport)
    broken: Any = Broken(transport.comm)
    transport.comm = broken
try:
    hvd.allreduce(np.ones(3), name="wrong")
except hvd.CommunicationError as error:
    print(f"rank {hvd.rank()}: {type(error).__name__}: {error}", flush=True)
