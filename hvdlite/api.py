"""The public functions, which act on the world of this process.

This module holds the process's state: the one world that `init` makes, and, in tests, the worlds of threads that act as ranks.
Every operation is described here once. The adapters' functions of the same names say only what differs for their framework.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

from hvdlite.comm.interrupt import Interrupt
from hvdlite.comm.local import LocalFabric
from hvdlite.comm.point_to_point import PointToPointCollectives
from hvdlite.config import Config
from hvdlite.errors import ArgumentError, HvdliteError, NotInitializedError
from hvdlite.launcher_link.generation import Generation
from hvdlite.launcher_link.handlers import silence_handlers
from hvdlite.launcher_link.link import check_address
from hvdlite.operations import (
    Allgather,
    AllgatherObject,
    Allreduce,
    Alltoall,
    Barrier,
    Broadcast,
    BroadcastObject,
    Operation,
    Reducescatter,
)
from hvdlite.operations.negotiation.engine import Engine
from hvdlite.operations.negotiation.handle import Handle
from hvdlite.protocols import ReduceOp
from hvdlite.ranks.grid import Grid
from hvdlite.ranks.process_set import ProcessSet
from hvdlite.runtime.group import RebindableExchange
from hvdlite.runtime.world import World
from hvdlite.watchdog import failure
from hvdlite.watchdog.stall_report import stack_of

T = TypeVar("T")

Sum = ReduceOp.SUM
"""The sum of the ranks' values."""
Average = ReduceOp.AVERAGE
"""The sum of the ranks' values, divided by the number of all ranks; of integers, rounded toward zero."""
Min = ReduceOp.MIN
"""The least of the ranks' values; for bool, whether all are true."""
Max = ReduceOp.MAX
"""The largest of the ranks' values; for bool, whether any is true."""
Product = ReduceOp.PRODUCT
"""The product of the ranks' values."""
Adasum = ReduceOp.ADASUM
"""Averages tensors that point in the same direction, and adds those at a right angle (arXiv:2006.02924)."""

_process_world: World | None = None
_left: list[RebindableExchange] = []
"""The objects that exchange gradients, from worlds that this process has left. The next world takes them over."""
_thread_world: ContextVar[World | None] = ContextVar("hvdlite_world", default=None)


class _GlobalProcessSet(ProcessSet):
    """The set of all ranks of the world that the caller is in."""

    communicator = None
    mpi_comm = None  # no property, because ``init(comm)`` of Horovod's modules sets it

    def __init__(self) -> None:
        self.process_set_id = 0

    @property
    def members(self) -> tuple[int, ...]:  # type: ignore[override]
        return world("global_process_set").ranks()

    def size(self) -> int | None:
        return size() if is_initialized() else None

    def rank(self) -> int | None:
        return rank() if is_initialized() else None

    def included(self) -> bool | None:
        return True if is_initialized() else None

    def __repr__(self) -> str:
        return "global_process_set"

    def __str__(self) -> str:
        return super().__str__() if is_initialized() else repr(self)


global_process_set: ProcessSet = _GlobalProcessSet()
"""The set of all ranks."""


# The world

at_the_end: list[Callable[[World], None]] = []
"""Functions of the adapters that are called when the program has come to its end, before this rank leaves the job."""
before_leaving: list[Callable[[World], None]] = []
"""Functions of the adapters that are called by `shutdown`, and when the program has come to its end. They may wait for other
ranks, for all ranks come there."""


def init(
    comm: Sequence[int] | Any | None = None, process_sets: Iterable[ProcessSet | Iterable[int]] | str | None = None
) -> None:
    """Join the job. Call this function once, before all others of this package; further calls do nothing.

    The function works under hvdliterun, mpirun, mpiexec and srun, and in one plain process. After it, an uncaught exception on
    any rank ends the job on all ranks.

    A program can call `init` again after `shutdown`, also with other processes. Distributed optimizers that it made before
    continue to work, in the order in which they were made; a new process makes its own optimizers right after `init`. The
    optimizers of a process set continue as soon as the program passes the same `ProcessSet` object to `init` or to
    `add_process_set`.

    Args:
        comm: The processes of the job: either ranks of ``MPI.COMM_WORLD``, in any order, the same on each of these processes;
            or an mpi4py communicator, which is duplicated; None means all processes. The other processes do not call `init`,
            or call it with a disjoint set.
        process_sets: The sets to add at once, the same on every rank. "dynamic" is Horovod's and has no effect, because sets
            can always be added later.

    Raises:
        ArgumentError: `comm` does not contain this process, or the processes in it passed different ranks; or `process_sets` is
            a text other than "dynamic", or contains equal sets or unknown ranks; or all ranks are to serve (``--servers``). The
            job has not begun then.
        WorldSizeError: A launcher started several processes, but MPI sees only this one.
        ThreadLevelError: The MPI library does not support threads.
        MissingPackageError: This process is one of several, and no MPI library is installed. A single process needs none.

    Examples:
        >>> def program():
        ...     hvdlite.init()  # makes no difference here: `on_ranks` lets threads be ranks that have joined
        ...     return hvdlite.rank(), hvdlite.size()
        >>> on_ranks(2, program)
        [(0, 2), (1, 2)]
    """
    global _process_world
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise ArgumentError(f'process_sets={process_sets!r}: expected process sets, or "dynamic".')
    if is_initialized():
        return
    config = Config.from_env()
    if config.control:
        check_address(config.control)
    _process_world = _connect(comm, config)
    if size() > 1 and not config.control:  # hvdliterun's worker does that itself
        failure.end_job_on_uncaught_exceptions()
    atexit.register(_leave_at_exit)
    _look_after_children()
    try:
        _check_servers(config)
        for process_set in () if process_sets is None or isinstance(process_sets, str) else process_sets:
            add_process_set(process_set)
        _rebind(_process_world)
    except BaseException:  # all ranks fail alike, and a second attempt begins anew
        _leave("its init() has failed.")
        raise


def _check_servers(config: Config) -> None:
    if config.servers >= size():
        raise ArgumentError(
            f"--servers {config.servers} (HVDLITE_SERVERS): the job has {size()} rank{'s' * (size() > 1)}, so none is left to "
            "train. Start more ranks, or fewer servers."
        )


def _rebind(here: World) -> None:
    """Let the new world take over the gradient exchanges of earlier worlds that the program still holds."""
    global _left
    if _left:
        gc.collect()  # so that exchanges which the program has dropped are gone on every rank
        exchanges, _left = [exchange for exchange in _left if not exchange.dropped], []
        here.groups.adopt(exchanges)


def _connect(comm: Sequence[int] | Any | None, config: Config) -> World:
    from hvdlite.comm.mpi.start import start_mpi

    if not start_mpi() and comm is None:
        alone = LocalFabric(1).transports[0]
        return World(alone, PointToPointCollectives, [0], config, functools.partial(failure.end_job, config, 0))
    from hvdlite.comm.mpi.job import connect, make_collectives

    interrupt = Interrupt() if comm is None and _outlives(config) else None
    transport, hosts = connect(comm, interrupt)
    make_flat, endpoint = make_collectives(transport, config, interrupt)
    end_job = functools.partial(failure.end_job, config, transport.rank)
    return World(transport, make_flat, hosts, config, end_job, interrupt, endpoint=endpoint)


def _outlives(config: Config) -> bool:
    try:
        return bool(config.generation) and Generation.parse(config.generation).outlives
    except ValueError:  # `hvdlite.elastic.run` says so
        return False


def go_on(hosts: Mapping[int, int], number: int, config: Config, interrupt: Interrupt) -> None:
    """Go on in a new world, of the ranks that are left after others have failed. `hvdlite.elastic.run` calls this.

    All of these ranks call it, when no wait in the world before lasts any more. What exchanges gradients continues, as after
    ``shutdown()`` and ``init()``. If this raises `PeerLeftError`, because more ranks have failed, it can be called again.

    Args:
        hosts: For each of these ranks, by its number in the job as it was started, a number of its host.
        number: The number of the generation that they form.
        config: The settings.
        interrupt: Ends every wait of the new world.
    """
    global _process_world
    from hvdlite.comm.mpi.job import connect_again, make_collectives
    from hvdlite.comm.mpi.start import never_finalize

    never_finalize()
    _abandon()
    ranks = sorted(hosts)
    places = [hosts[rank] for rank in ranks]
    transport = connect_again(ranks, number, places, interrupt)
    make_flat, endpoint = make_collectives(transport, config, interrupt)
    end_job = functools.partial(failure.end_job, config, ranks[transport.rank])
    _process_world = World(transport, make_flat, places, config, end_job, interrupt, ranks, endpoint)
    _rebind(_process_world)


def _abandon() -> None:
    """Leave a world some of whose ranks have failed: nobody can be told."""
    global _process_world
    if _process_world is None:
        return
    left, _process_world = _process_world, None
    left.over = True
    left.abandon()
    exchanges = left.groups.left()
    for exchange in exchanges:
        exchange.leave()
    _left.extend(exchanges)


@functools.cache  # once in a process, however often `init` is called
def _look_after_children() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_become_child)


def _become_child() -> None:
    """Mark the world in a forked child as a copy: the child can read the rank and the size, but not communicate."""
    atexit.unregister(_leave_at_exit)
    if _process_world is not None:
        _process_world.become_child()


def shutdown() -> None:
    """Leave the job. The function waits until every rank has called it or has come to its end; before `init` it does nothing.

    Operations that are still in flight are abandoned.

    Examples:
        >>> def program():
        ...     hvdlite.init()
        ...     before = hvdlite.is_initialized()
        ...     hvdlite.shutdown()
        ...     return before, hvdlite.is_initialized()
        >>> hvdlite.run(program, num_proc=1)  # this rank is a process
        [(True, False)]
    """
    if _process_world is not None and not _process_world.is_childs_copy:
        _check_served(_process_world)
        for act in before_leaving:
            act(_process_world)
    _leave(f"it has called shutdown(), here:\n{stack_of(threading.get_ident())} ")


def _check_served(here: World) -> None:
    if here.config.servers and not here.has_servers:
        raise ArgumentError(
            f"this job has --servers {here.config.servers} (HVDLITE_SERVERS), and rank {here.topology.rank} has not made an "
            "AsyncDistributedOptimizer, so nothing was served. Make one on all ranks, or start the job without --servers."
        )


def _leave_at_exit() -> None:
    silence_handlers()  # a timer of the program may fire while this rank waits for the end of the others
    if _process_world is not None and not _process_world.is_childs_copy:
        try:
            # After an exception that nobody has caught (one process; of several, the job has ended) nothing is to be finished.
            for act in (*([] if hasattr(sys, "last_value") else (_check_served, *before_leaving)), *at_the_end):
                act(_process_world)
        except BaseException:  # Python would go on, with exit code 0, and the other ranks would wait for this one
            _process_world.watch.fail(HvdliteError(f"at the end of the program:\n{traceback.format_exc()}"))
    _leave("it has come to the end of its program.", for_good=True)


def _leave(how: str, for_good: bool = False) -> None:
    global _process_world
    if _process_world is not None and not _process_world.is_childs_copy:
        leaving, _process_world = _process_world, None
        atexit.unregister(_leave_at_exit)
        leaving.shutdown(how, for_good)
        _left.extend(leaving.groups.left())


def is_initialized() -> bool:
    """Return whether `init` has been called, and `shutdown` has not been called since.

    Examples:
        >>> hvdlite.is_initialized(), on_ranks(1, hvdlite.is_initialized)
        (False, [True])
    """
    return _thread_world.get() is not None or _process_world is not None


def world(call: str = "world") -> World:
    """Return the world of this process. Adapters use this; programs do not.

    Args:
        call: The function that the program called, for the text of the error.

    Raises:
        NotInitializedError: `init` has not been called.
    """
    found = _thread_world.get() or _process_world
    if found is None:
        raise NotInitializedError.of(call)
    return found


@contextlib.contextmanager
def in_world(other: World) -> Iterator[None]:
    """Let this thread be a rank of another world while the body runs. Tests run ranks as threads in this way."""
    token = _thread_world.set(other)
    try:
        yield
    finally:
        _thread_world.reset(token)


def rank() -> int:
    """Return this process's number in the job, 0 … size() - 1.

    Examples:
        >>> on_ranks(3, hvdlite.rank)
        [0, 1, 2]
    """
    return world("rank()").topology.rank


def size() -> int:
    """Return the number of processes in the job.

    Examples:
        >>> on_ranks(3, hvdlite.size)
        [3, 3, 3]
    """
    return world("size()").topology.size


def local_rank() -> int:
    """Return this process's number among the processes of its host, 0 … local_size() - 1; it tells which GPU to use.

    Examples:
        >>> on_ranks(4, hvdlite.local_rank, hosts=[0, 0, 1, 1])
        [0, 1, 0, 1]
    """
    return world("local_rank()").topology.local_rank


def local_size() -> int:
    """Return the number of processes on this host.

    Examples:
        >>> on_ranks(3, hvdlite.local_size, hosts=[0, 0, 1])
        [2, 2, 1]
    """
    return world("local_size()").topology.local_size


def cross_rank() -> int:
    """Return this host's number among the hosts that have a process of this local rank, 0 … cross_size() - 1.

    Examples:
        >>> on_ranks(4, hvdlite.cross_rank, hosts=[0, 0, 1, 1])
        [0, 0, 1, 1]
    """
    return world("cross_rank()").topology.cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a process of this local rank.

    Examples:
        >>> on_ranks(4, hvdlite.cross_size, hosts=[0, 0, 1, 1])
        [2, 2, 2, 2]
    """
    return world("cross_size()").topology.cross_size


def is_server() -> bool:
    """Return whether this rank only serves parameters: it is one of the last N ranks of a job that has ``--servers N``.

    The program of such a rank makes the same `AsyncDistributedOptimizer` as the others, and then calls `serve_parameters`
    instead of its loop (``hvdlite docs asynchronous``).

    Examples:
        >>> from hvdlite.config import Config
        >>> on_ranks(3, hvdlite.is_server, config=Config(servers=1))
        [False, False, True]
    """
    here = world("is_server()")
    return here.topology.rank >= here.topology.size - here.config.servers


def mpi_threads_supported() -> bool:
    """Return True: several threads may call MPI at once, because `init` refuses an MPI library that does not allow it.

    Examples:
        >>> on_ranks(1, hvdlite.mpi_threads_supported)
        [True]
    """
    world("mpi_threads_supported()")
    return True


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of processes.

    Examples:
        >>> on_ranks(3, hvdlite.is_homogeneous, hosts=[0, 0, 1])
        [False, False, False]
    """
    return world("is_homogeneous()").topology.is_homogeneous


def describe() -> str:
    """Describe the job for the first line of a program's output: "4 ranks on 2 hosts (Open MPI v5.0.11)".

    Examples:
        >>> on_ranks(3, hvdlite.describe, hosts=[0, 0, 1])[0]
        '3 ranks on 2 hosts (one process, without MPI)'
    """
    return world("describe()").describe()


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Start to record what every rank does and when, as a Chrome trace. Every rank calls this function.

    Args:
        file_path: The file of the trace; rank 0's argument counts. Until `stop_timeline` (or the end of the job) merges them,
            each rank's own file is in the folder ``<file_path>.ranks``.
        mark_cycles: Whether the trace marks when the ranks agreed on what to run; rank 0's argument counts.

    Raises:
        ArgumentError: A timeline is being recorded already, or a rank cannot write its file. All ranks raise it.
        MismatchError: Another rank called another function.

    Examples:
        >>> import pathlib, tempfile
        >>> def traced(path):
        ...     hvdlite.start_timeline(path)
        ...     hvdlite.allreduce(np.ones(3), name="weights")
        ...     hvdlite.stop_timeline()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     done = on_ranks(2, traced, f"{folder}/trace.json")
        ...     "weights" in pathlib.Path(folder, "trace.json").read_text()
        True
    """
    world("start_timeline()").start_timeline(os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """End the recording and complete the trace. Every rank calls this function; it does nothing if no timeline is recorded.

    Raises:
        HvdliteError: The trace could not be written. All ranks raise it.
        MismatchError: Another rank called another function.

    Examples:
        >>> import os, tempfile
        >>> def traced(path):
        ...     hvdlite.start_timeline(path)
        ...     hvdlite.stop_timeline()
        ...     return os.path.exists(path)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     on_ranks(2, traced, f"{folder}/trace.json")
        [True, True]
    """
    world("stop_timeline()").stop_timeline()


def add_process_set(process_set: ProcessSet | Iterable[int] | Any) -> ProcessSet:
    """Put a process set into effect. Every rank of the job calls this function, with equal ranks.

    Args:
        process_set: The set, or its world ranks; or an mpi4py communicator. Ranks may pass different communicators (the parts
            of a split one); then a set for each of them takes effect.

    Returns:
        The set; with communicators, the set that contains this rank.

    Raises:
        ArgumentError: A rank is unknown or repeated, or a set of these ranks is in effect already.
        MismatchError: The ranks asked for different sets.

    Examples:
        >>> def of_two():
        ...     pair = hvdlite.add_process_set([0, 2])
        ...     if pair.included():
        ...         return hvdlite.allreduce(np.array([hvdlite.rank()]), hvdlite.Sum, process_set=pair).item()
        >>> on_ranks(3, of_two)
        [2, None, 2]
    """
    here = world("add_process_set()")
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    return here.groups.add(process_set) if process_set.communicator is None else add_parts(process_set, here.groups.add)


def add_parts(process_set: ProcessSet, add: Callable[[ProcessSet], object]) -> ProcessSet:
    """Call `add` with a set for each communicator that a rank passed. Every rank of the job calls this."""
    here = world("add_process_set()")
    from hvdlite.comm.mpi.job import members_of

    places = here.engine().run(AllgatherObject(members_of(process_set.communicator)))
    numbers = {mpi_rank: rank for rank, (mpi_rank, _) in enumerate(places)}
    own = places[here.topology.rank][1]
    parts = list(dict.fromkeys(members for _, members in places if members))
    strangers = sorted({member for part in parts for member in part if member not in numbers})
    if strangers or not parts:
        raise ArgumentError(
            f"ProcessSet(communicator): ranks {strangers} of MPI.COMM_WORLD are not in this job; pass them to init(comm=…)."
            if parts
            else "ProcessSet(communicator): every rank passed MPI.COMM_NULL; expected a communicator on some ranks."
        )
    for part in parts:
        ranks = [numbers[member] for member in part]
        if part == (own or parts[0]):  # a rank that is in no part gets the first part, which does not include it
            process_set.take_ranks(ranks)
            add(process_set)
        else:
            add(ProcessSet(ranks))
    return process_set


def new_group(ranks: Iterable[int]) -> ProcessSet:
    """Make a process set that takes effect at once, also if another set has the same ranks. Every rank of the job calls this.

    Operations of different groups are kept apart, even if they have equal names and equal ranks, so a library can have a group
    of its own. (`add_process_set` refuses a second set of equal ranks, as Horovod does.)

    Args:
        ranks: World ranks, in any order, each once; the same on every rank of the job. The other ranks of the job call this
            function as well.

    Returns:
        The set, for the argument `process_set` of operations and optimizers, and for `remove_process_set`.

    Raises:
        ArgumentError: A rank is unknown or repeated.
        MismatchError: The ranks of the job asked for different groups.

    Examples:
        >>> def pairs():
        ...     first, second = hvdlite.new_group([0, 1]), hvdlite.new_group([2, 3])
        ...     mine = first if hvdlite.rank() < 2 else second
        ...     return hvdlite.allreduce(np.array([hvdlite.rank()]), hvdlite.Sum, process_set=mine).item()
        >>> on_ranks(4, pairs)
        [1, 1, 5, 5]
    """
    here = world("new_group()")
    if isinstance(ranks, ProcessSet):
        ranks = ranks.ranks
    if hasattr(ranks, "Get_group"):
        raise ArgumentError("new_group(communicator): expected world ranks; add_process_set() takes a communicator.")
    return here.groups.new(ranks)


class ProcessGrid(Grid):
    """The ranks of the job on a grid with named axes, such as ``ProcessGrid(dp=2, pp=2, tp=2)``. All ranks of the job make it.

    ``grid["dp"]`` is the process set of the ranks that differ from this one in their place on this axis only. Ranks that are
    neighbours on "tp", then on "pp", then on the last of the other axes share hosts. ``print(grid)`` shows a picture.

    Args:
        axes: The size of each axis by its name. Their product is the number of ranks. One size may be -1, for what is left.

    Attributes:
        axes: The size of each axis by its name, in the order of the arguments.
        ranks: The world rank at each place: int64, of shape ``tuple(axes.values())``.
        place: The place of this rank on each axis.

    Raises:
        ArgumentError: The product of the axes is not the number of ranks, or a size is not positive.
        MismatchError: The ranks asked for different grids.

    Examples:
        >>> print(*on_ranks(4, lambda: str(hvdlite.ProcessGrid(dp=2, tp=2)), hosts=[0, 0, 1, 1])[:1])
        ProcessGrid(dp=2, tp=2): 4 ranks on 2 hosts
                tp 0  tp 1
          dp 0     0     1  host 0
          dp 1     2     3  host 1
          tp within hosts; dp between hosts
        >>> on_ranks(4, lambda: hvdlite.ProcessGrid(dp=2, tp=2)["tp"].ranks)
        [[0, 1], [0, 1], [2, 3], [2, 3]]
    """

    def __init__(self, **axes: int) -> None:
        here = world("ProcessGrid()")
        super().__init__(axes, here.hosts)
        self.place = self.place_of(here.topology.rank)
        self._sets: dict[str, ProcessSet] = {}
        for name in self.axes:
            for line in self.lines(name):
                made = here.groups.new(line)
                if here.topology.rank in line:
                    self._sets[name] = made

    def __getitem__(self, name: str) -> ProcessSet:
        """Return the process set along an axis that contains this rank.

        Raises:
            ArgumentError: The grid has no such axis.
        """
        return self._sets[self.check_axis(name)]


def remove_process_set(process_set: ProcessSet) -> bool:
    """Take a process set out of effect. Every rank of the job calls this function.

    Returns:
        True if the set was in effect, otherwise False.

    Raises:
        ArgumentError: Operations of the set are in flight.

    Examples:
        >>> def removed():
        ...     pair = hvdlite.add_process_set([0, 2])
        ...     return hvdlite.remove_process_set(pair), hvdlite.remove_process_set(pair)
        >>> on_ranks(3, removed)
        [(True, False), (True, False), (True, False)]
    """
    return world("remove_process_set()").groups.remove(process_set)


def join(process_set: ProcessSet | None = None) -> int:
    """Say that this rank has run out of data, and wait until every rank has joined.

    Until then, this rank takes part in the other ranks' operations, named or not, without data of its own:

    - `allreduce` and `reducescatter`: this rank contributes the neutral element of `op`, such as 0 for Sum, Adasum and Average.
      Average still divides by the number of all ranks, as in Horovod.
    - `allgather` and `alltoall`: this rank contributes no rows, and drops the rows that other ranks send to it.
    - `allgather_object`: the list has None for this rank.
    - `broadcast` and `broadcast_object`: this rank drops the value. If it is the root, the call fails on its callers.
    - `barrier`: this rank counts as present.

    This rank contributes its own data to operations that it started before (``…_async``). Functions that need every rank fail
    on the ranks that call them: `add_process_set`, `remove_process_set`, and the making of a `DistributedOptimizer`'s buffers.

    This rank also takes part in the steps of a `DistributedOptimizer`: an average of gradients is the average over the ranks
    that still have data. In the end every rank has the parameters and the optimizer state of the rank that went furthest.

    Args:
        process_set: The ranks whose operations this rank takes part in; all ranks by default. Each set is joined by itself.

    Returns:
        The number within `process_set` of the rank that joined last, the same on all ranks. If ranks missed steps of an
        optimizer, it is the rank that missed the fewest steps, and among equals the one that has accumulated the most
        gradients since.

    Raises:
        HvdliteError: This rank has joined already, in another thread. (Any other operation of the set raises it too, on a rank
            that has joined while others have not.)
        PeerLeftError: A rank has left the job without joining.

    Examples:
        >>> def uneven():
        ...     for _ in range(1 + hvdlite.rank()):
        ...         total = hvdlite.allreduce(np.array([1]), hvdlite.Sum, "count")
        ...     return hvdlite.join(), total.item()
        >>> on_ranks(2, uneven)
        [(1, 2), (1, 1)]
    """
    return world("join()").group(process_set).join()


# Operations: `_allreduce` prepares the call that `allreduce` runs and `allreduce_async` submits, and so on.


@dataclass(slots=True)
class Call(Generic[T]):
    """An operation ready to be submitted, whose result is a T.

    Attributes:
        engine: The engine that runs the operation.
        operation: The operation with its tensors and arguments.
        name: The name that the caller gave, or None.
    """

    engine: Engine
    operation: Operation
    name: str | None


def _allreduce(
    tensor: T,
    op: ReduceOp,
    name: str | None,
    inplace: bool,
    prescale_factor: float,
    postscale_factor: float,
    algorithm: str | None,
    process_set: ProcessSet | None,
) -> Call[T]:
    here = world("allreduce()")
    if algorithm is None:
        algorithm = "auto" if op is Adasum else here.config.algorithm
    operation = Allreduce(tensor, op, prescale_factor, postscale_factor, algorithm, inplace)
    return Call(here.engine(process_set), operation, name)


def allreduce(
    tensor: T,
    op: ReduceOp = Average,
    name: str | None = None,
    *,
    inplace: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    algorithm: str | None = None,
    process_set: ProcessSet | None = None,
) -> T:
    """Reduce a tensor elementwise over the ranks.

    Args:
        tensor: A tensor of any shape; shape and dtype are the same on every rank. Or a list of tensors of any dtypes, which the
            ranks exchange as one operation.
        op: Sum, Average, Min, Max, Product or Adasum. float16 and bfloat16 are accumulated as float32; averages of integers are
            rounded toward zero; for bool, Min is 'all' and Max is 'any'. Adasum averages tensors that point in the same
            direction and adds orthogonal ones (arXiv:2006.02924); it takes floating-point tensors, and each tensor of a list by
            itself.
        name: Calls of equal name belong together on all ranks; calls without a name belong together by their order.
        inplace: Whether the result overwrites `tensor`.
        prescale_factor: A factor that multiplies each rank's values before the reduction.
        postscale_factor: A factor that multiplies the result.
        algorithm: "auto", "shared_memory", "mpi", "ring", "tree", "butterfly", "rabenseifner" or "parameter_server"; None means
            the setting ``HVDLITE_ALGORITHM``, whose default is "auto". Adasum has one algorithm of its own.
        process_set: The ranks that take part; None means all ranks.

    Returns:
        The reduced tensor (or list) of the same kind, dtype and shape; `tensor` itself if `inplace`.

    Raises:
        ArgumentError: `op` or `algorithm` is not one of those above, or this rank is not in `process_set`.
        UnsupportedTensorError: `tensor` is not a tensor, or is read-only with `inplace`, or `op` is not defined for its dtype.
        MismatchError: The ranks' calls do not belong together, such as calls with different shapes. All ranks raise it.
        DuplicateNameError: An operation of this name is in flight.
        CommunicationError: A rank has left the job (PeerLeftError), or the communication failed.

    Examples:
        >>> on_ranks(3, lambda: hvdlite.allreduce(np.array([1, hvdlite.rank()]), hvdlite.Sum).tolist())
        [[3, 3], [3, 3], [3, 3]]
    """
    call = _allreduce(tensor, op, name, inplace, prescale_factor, postscale_factor, algorithm, process_set)
    result: T = call.engine.run(call.operation, call.name)
    return result


def allreduce_async(
    tensor: T,
    op: ReduceOp = Average,
    name: str | None = None,
    *,
    inplace: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    algorithm: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handle[T]:
    """Start `allreduce` and return a `Handle` at once. The arguments are those of `allreduce`.

    ``handle.wait()`` waits for the result of `allreduce` and returns it; ``handle.poll()`` says whether the operation is over.
    The program must not change the tensors before the operation is over.

    Examples:
        >>> def overlapped():
        ...     handle = hvdlite.allreduce_async(np.array([1.0]), hvdlite.Sum, "ones")
        ...     return handle.wait().item()
        >>> on_ranks(2, overlapped)
        [2.0, 2.0]
    """
    call = _allreduce(tensor, op, name, inplace, prescale_factor, postscale_factor, algorithm, process_set)
    return call.engine.submit(call.operation, call.name)


def _allgather(tensor: T, name: str | None, process_set: ProcessSet | None) -> Call[T]:
    operation = Allgather(tensor)
    return Call(world("allgather()").engine(process_set), operation, name)


def allgather(tensor: T, name: str | None = None, *, process_set: ProcessSet | None = None) -> T:
    """Concatenate the ranks' tensors along the first dimension.

    Args:
        tensor: A tensor, or a list of tensors. The first dimension may differ between ranks and may be 0; the other dimensions
            and the dtype are the same on every rank. A scalar counts as a vector of one element.
        name: See `allreduce`.
        process_set: See `allreduce`.

    Returns:
        The rows of all ranks in rank order, the same on every rank.

    Raises:
        HvdliteError: See `allreduce`.

    Examples:
        >>> on_ranks(2, lambda: hvdlite.allgather(np.full(1 + hvdlite.rank(), hvdlite.rank())).tolist())
        [[0, 1, 1], [0, 1, 1]]
    """
    call = _allgather(tensor, name, process_set)
    result: T = call.engine.run(call.operation, call.name)
    return result


def allgather_async(tensor: T, name: str | None = None, *, process_set: ProcessSet | None = None) -> Handle[T]:
    """Start `allgather` and return a `Handle` at once; see `allreduce_async`. The arguments are those of `allgather`.

    Examples:
        >>> on_ranks(2, lambda: hvdlite.allgather_async(np.array([hvdlite.rank()])).wait().tolist())
        [[0, 1], [0, 1]]
    """
    call = _allgather(tensor, name, process_set)
    return call.engine.submit(call.operation, call.name)


def _broadcast(tensor: T, root_rank: int, name: str | None, inplace: bool, process_set: ProcessSet | None) -> Call[T]:
    engine = world("broadcast()").engine(process_set)
    operation = Broadcast(tensor, root_rank, engine.size, inplace)
    return Call(engine, operation, name)


def broadcast(
    tensor: T, root_rank: int, name: str | None = None, *, inplace: bool = False, process_set: ProcessSet | None = None
) -> T:
    """Give every rank the root's tensor.

    Args:
        tensor: A tensor, or a list of tensors; shapes and dtypes are the same on every rank.
        root_rank: The number within `process_set` of the root, whose values are sent.
        name: See `allreduce`.
        inplace: Whether the result overwrites `tensor`.
        process_set: See `allreduce`.

    Returns:
        A new tensor equal to the root's; `tensor` itself if `inplace`.

    Raises:
        ArgumentError: `root_rank` is not a rank of the set.
        HvdliteError: See `allreduce`.

    Examples:
        >>> on_ranks(2, lambda: hvdlite.broadcast(np.array([hvdlite.rank()]), root_rank=1).tolist())
        [[1], [1]]
    """
    call = _broadcast(tensor, root_rank, name, inplace, process_set)
    result: T = call.engine.run(call.operation, call.name)
    return result


def broadcast_async(
    tensor: T, root_rank: int, name: str | None = None, *, inplace: bool = False, process_set: ProcessSet | None = None
) -> Handle[T]:
    """Start `broadcast` and return a `Handle` at once; see `allreduce_async`. The arguments are those of `broadcast`.

    Examples:
        >>> on_ranks(2, lambda: hvdlite.broadcast_async(np.array([hvdlite.rank()]), root_rank=1).wait().tolist())
        [[1], [1]]
    """
    call = _broadcast(tensor, root_rank, name, inplace, process_set)
    return call.engine.submit(call.operation, call.name)


def _alltoall(tensor: Any, splits: Any, name: str | None, process_set: ProcessSet | None) -> Call[Any]:
    engine = world("alltoall()").engine(process_set)
    operation = Alltoall(tensor, splits, engine.size)
    return Call(engine, operation, name)


@overload
def alltoall(
    tensor: T, splits: None = None, name: str | None = None, *, process_set: ProcessSet | None = None
) -> T: ...
@overload
def alltoall(
    tensor: T, splits: Any, name: str | None = None, *, process_set: ProcessSet | None = None
) -> tuple[T, T]: ...
def alltoall(tensor: Any, splits: Any = None, name: str | None = None, *, process_set: ProcessSet | None = None) -> Any:
    """Send some rows of a tensor to each rank, and receive some rows from each.

    Args:
        tensor: A tensor of at least one dimension, or a list of such tensors. The first dimension may differ between ranks.
        splits: The number of rows for each rank, in rank order: whole numbers whose sum is the first dimension. None means
            equal numbers.
        name: See `allreduce`.
        process_set: See `allreduce`.

    Returns:
        The received rows, in the rank order of their senders. With `splits`, a pair of these rows and the number of rows from
        each rank (int32, one element for each rank, of the same kind as `tensor`).

    Raises:
        ArgumentError: `splits` does not fit the tensor or the number of ranks.
        HvdliteError: See `allreduce`.

    Examples:
        >>> on_ranks(2, lambda: hvdlite.alltoall(np.array([10, 11]) + 10 * hvdlite.rank()).tolist())
        [[10, 20], [11, 21]]
    """
    call = _alltoall(tensor, splits, name, process_set)
    result: Any = call.engine.run(call.operation, call.name)
    return result


@overload
def alltoall_async(
    tensor: T, splits: None = None, name: str | None = None, *, process_set: ProcessSet | None = None
) -> Handle[T]: ...
@overload
def alltoall_async(
    tensor: T, splits: Any, name: str | None = None, *, process_set: ProcessSet | None = None
) -> Handle[tuple[T, T]]: ...
def alltoall_async(
    tensor: Any, splits: Any = None, name: str | None = None, *, process_set: ProcessSet | None = None
) -> Handle[Any]:
    """Start `alltoall` and return a `Handle` at once; see `allreduce_async`. The arguments are those of `alltoall`.

    Examples:
        >>> on_ranks(2, lambda: hvdlite.alltoall_async(np.array([10, 11]) + 10 * hvdlite.rank()).wait().tolist())
        [[10, 20], [11, 21]]
    """
    call = _alltoall(tensor, splits, name, process_set)
    return call.engine.submit(call.operation, call.name)


def _reducescatter(
    tensor: T,
    op: ReduceOp,
    name: str | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet | None,
) -> Call[T]:
    operation = Reducescatter(tensor, op, prescale_factor, postscale_factor)
    return Call(world("reducescatter()").engine(process_set), operation, name)


def reducescatter(
    tensor: T,
    op: ReduceOp = Average,
    name: str | None = None,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> T:
    """Reduce a tensor elementwise over the ranks, and keep this rank's share of the rows.

    Args:
        tensor: A tensor of at least one dimension, or a list of such tensors; shapes and dtypes are the same on every rank. If
            the number of ranks does not divide the first dimension, the first ranks get one row more.
        op: Sum, Average, Min, Max or Product; see `allreduce`.
        name: See `allreduce`.
        prescale_factor: See `allreduce`.
        postscale_factor: See `allreduce`.
        process_set: See `allreduce`.

    Returns:
        This rank's rows of the reduced tensor.

    Raises:
        HvdliteError: See `allreduce`.

    Examples:
        >>> on_ranks(2, lambda: hvdlite.reducescatter(np.array([1, 2]), hvdlite.Sum).tolist())
        [[2], [4]]
    """
    call = _reducescatter(tensor, op, name, prescale_factor, postscale_factor, process_set)
    result: T = call.engine.run(call.operation, call.name)
    return result


def reducescatter_async(
    tensor: T,
    op: ReduceOp = Average,
    name: str | None = None,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle[T]:
    """Start `reducescatter` and return a `Handle` at once; see `allreduce_async`.

    The arguments are those of `reducescatter`.

    Examples:
        >>> on_ranks(2, lambda: hvdlite.reducescatter_async(np.array([1, 2]), hvdlite.Sum).wait().tolist())
        [[2], [4]]
    """
    call = _reducescatter(tensor, op, name, prescale_factor, postscale_factor, process_set)
    return call.engine.submit(call.operation, call.name)


def _barrier(name: str | None, process_set: ProcessSet | None) -> Call[None]:
    return Call(world("barrier()").engine(process_set), Barrier(), name)


def barrier(name: str | None = None, *, process_set: ProcessSet | None = None) -> None:
    """Return when every rank has called this function.

    Args:
        name: See `allreduce`.
        process_set: See `allreduce`.

    Raises:
        HvdliteError: See `allreduce`.

    Examples:
        >>> on_ranks(2, hvdlite.barrier)
        [None, None]
    """
    call = _barrier(name, process_set)
    call.engine.run(call.operation, call.name)


def barrier_async(name: str | None = None, *, process_set: ProcessSet | None = None) -> Handle[None]:
    """Start `barrier` and return a `Handle` at once; see `allreduce_async`. The arguments are those of `barrier`.

    Examples:
        >>> on_ranks(2, lambda: hvdlite.barrier_async().wait())
        [None, None]
    """
    call = _barrier(name, process_set)
    return call.engine.submit(call.operation, call.name)


def _broadcast_object(obj: T, root_rank: int, name: str | None, process_set: ProcessSet | None) -> Call[T]:
    engine = world("broadcast_object()").engine(process_set)
    return Call(engine, BroadcastObject(obj, root_rank, engine.rank, engine.size), name)


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, *, process_set: ProcessSet | None = None
) -> T:
    """Give every rank the root's object.

    Args:
        obj: An object that can be pickled; the other ranks' objects are ignored.
        root_rank: See `broadcast`.
        name: See `allreduce`.
        process_set: See `allreduce`.

    Returns:
        On the root `obj` itself, on the other ranks a copy of it.

    Raises:
        HvdliteError: See `broadcast`.

    Examples:
        >>> on_ranks(2, lambda: hvdlite.broadcast_object(f"from rank {hvdlite.rank()}", root_rank=1))
        ['from rank 1', 'from rank 1']
    """
    call = _broadcast_object(obj, root_rank, name, process_set)
    result: T = call.engine.run(call.operation, call.name)
    return result


def broadcast_object_async(
    obj: T, root_rank: int = 0, name: str | None = None, *, process_set: ProcessSet | None = None
) -> Handle[T]:
    """Start `broadcast_object` and return a `Handle` at once; see `allreduce_async`.

    The arguments are those of `broadcast_object`.

    Examples:
        >>> on_ranks(2, lambda: hvdlite.broadcast_object_async(f"from rank {hvdlite.rank()}", root_rank=1).wait())
        ['from rank 1', 'from rank 1']
    """
    call = _broadcast_object(obj, root_rank, name, process_set)
    return call.engine.submit(call.operation, call.name)


def _allgather_object(obj: T, name: str | None, process_set: ProcessSet | None) -> Call[list[T]]:
    return Call(world("allgather_object()").engine(process_set), AllgatherObject(obj), name)


def allgather_object(obj: T, name: str | None = None, *, process_set: ProcessSet | None = None) -> list[T]:
    """Give every rank the objects of all ranks.

    Args:
        obj: An object that can be pickled.
        name: See `allreduce`.
        process_set: See `allreduce`.

    Returns:
        Copies of the objects, in rank order.

    Raises:
        HvdliteError: See `allreduce`.

    Examples:
        >>> on_ranks(2, lambda: hvdlite.allgather_object({"rank": hvdlite.rank()}))[0]
        [{'rank': 0}, {'rank': 1}]
    """
    call = _allgather_object(obj, name, process_set)
    result: list[T] = call.engine.run(call.operation, call.name)
    return result


def allgather_object_async(
    obj: T, name: str | None = None, *, process_set: ProcessSet | None = None
) -> Handle[list[T]]:
    """Start `allgather_object` and return a `Handle` at once; see `allreduce_async`.

    The arguments are those of `allgather_object`.

    Examples:
        >>> on_ranks(2, lambda: hvdlite.allgather_object_async({"rank": hvdlite.rank()}).wait())[0]
        [{'rank': 0}, {'rank': 1}]
    """
    call = _allgather_object(obj, name, process_set)
    return call.engine.submit(call.operation, call.name)
