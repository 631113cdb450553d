"""The public functions, on the world of this process.

The only module with state: the one world that `init` makes, and the worlds of threads that play ranks in tests.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

from hvdlite.comm.local import LocalFabric
from hvdlite.comm.point_to_point import PointToPointCollectives
from hvdlite.config import Config
from hvdlite.errors import ArgumentError, NotInitializedError
from hvdlite.group import RebindableExchange
from hvdlite.launcher_link.handlers import silence_handlers
from hvdlite.launcher_link.link import check_address
from hvdlite.negotiation.engine import Engine
from hvdlite.negotiation.handle import Handle
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
from hvdlite.process_set import ProcessSet
from hvdlite.protocols import ReduceOp
from hvdlite.watchdog import failure
from hvdlite.watchdog.stall_report import stack_of
from hvdlite.world import World

T = TypeVar("T")

Sum, Average, Min, Max, Product, Adasum = (
    ReduceOp.SUM,
    ReduceOp.AVERAGE,
    ReduceOp.MIN,
    ReduceOp.MAX,
    ReduceOp.PRODUCT,
    ReduceOp.ADASUM,
)

_process_world: World | None = None
_left: list[RebindableExchange] = []
"""What adapters had made to exchange gradients in the worlds that this process has left: the next one takes it over."""
_thread_world: ContextVar[World | None] = ContextVar("hvdlite_world", default=None)


class _GlobalProcessSet(ProcessSet):
    """All ranks of whichever world the caller is in."""

    communicator = None

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


global_process_set: ProcessSet = _GlobalProcessSet()
"""The set of all ranks."""


# The world

at_the_end: list[Callable[[World], None]] = []
"""What adapters look at when the program has come to its end, before this rank leaves."""


def init(
    comm: Sequence[int] | Any | None = None, process_sets: Iterable[ProcessSet | Iterable[int]] | str | None = None
) -> None:
    """Join the job. Call it once, before anything else of this package; more calls do nothing.

    Works under hvdliterun, mpirun, mpiexec and srun, and as one plain process. From now on an uncaught exception on any rank
    ends the job on all.

    After `shutdown` it can be called again, also with other processes. Distributed optimizers that were made before go on, in
    the order in which they were made; a new process makes its own right after it has called this. Those of a process set go on
    as soon as that very `ProcessSet` object is passed to this function or to `add_process_set`.

    Args:
        comm: The processes that make up the job: ranks of ``MPI.COMM_WORLD``, in any order, the same on each of them; or an
            mpi4py communicator, which is duplicated; all processes if None. Those that are not among them do not call this,
            or do with others.
        process_sets: Sets to add at once, the same on every rank. Sets can always be added later, so "dynamic", which asks
            for that, changes nothing.

    Raises:
        ArgumentError: `comm` does not hold this process, or the processes that it names called with other ranks; or
            `process_sets` is another text, or has a set twice or of unknown ranks. The job has not begun then.
        WorldSizeError: A launcher started several processes and MPI sees only this one.
        ThreadLevelError: The MPI library does not support threads.
        MissingPackageError: This process is one of several, and no MPI library is installed. One alone does without.
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
        for process_set in () if process_sets is None or isinstance(process_sets, str) else process_sets:
            add_process_set(process_set)
        _rebind(_process_world)
    except BaseException:  # on all ranks alike: a second attempt begins anew
        _leave("its init() has failed.")
        raise


def _rebind(here: World) -> None:
    """Let what the program has made in earlier worlds, and still holds, go on in this one."""
    global _left
    if _left:
        gc.collect()  # what the program has dropped is to be gone on every rank
        exchanges, _left = [exchange for exchange in _left if not exchange.dropped], []
        here.groups.adopt(exchanges)


def _connect(comm: Sequence[int] | Any | None, config: Config) -> World:
    from hvdlite.comm.mpi_start import start_mpi

    if not start_mpi() and comm is None:
        alone = LocalFabric(1).transports[0]
        return World(alone, PointToPointCollectives, [0], config, functools.partial(failure.end_job, config, 0))
    from hvdlite.comm.mpi_collectives import MpiCollectives
    from hvdlite.comm.mpi_job import connect

    transport, hosts = connect(comm)
    return World(transport, MpiCollectives, hosts, config, functools.partial(failure.end_job, config, transport.rank))


@functools.cache  # once for a process, whatever is initialised how often
def _look_after_children() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_become_child)


def _become_child() -> None:
    """In a forked child: it has a copy of the rank's world, and may look at it, and no more."""
    atexit.unregister(_leave_at_exit)
    if _process_world is not None:
        _process_world.become_child()


def shutdown() -> None:
    """Leave the job: waits until every rank has called it (or has come to its end). Does nothing before `init`.

    Operations still in flight are given up.
    """
    _leave(f"it has called shutdown(), here:\n{stack_of(threading.get_ident())} ")


def _leave_at_exit() -> None:
    silence_handlers()  # a time limit of the program's may run out while this rank waits for the others' ends
    if _process_world is not None and not _process_world.is_childs_copy:
        for look in at_the_end:
            look(_process_world)
    _leave("it has come to the end of its program.", for_good=True)


def _leave(how: str, for_good: bool = False) -> None:
    global _process_world
    if _process_world is not None and not _process_world.is_childs_copy:
        leaving, _process_world = _process_world, None
        atexit.unregister(_leave_at_exit)
        leaving.shutdown(how, for_good)
        _left.extend(leaving.groups.left())


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` was not."""
    return _thread_world.get() is not None or _process_world is not None


def world(call: str = "world") -> World:
    """The world of this process (for adapters; not for programs).

    Raises:
        NotInitializedError: Before `init`; the text names `call`.
    """
    found = _thread_world.get() or _process_world
    if found is None:
        raise NotInitializedError.of(call)
    return found


@contextlib.contextmanager
def in_world(other: World) -> Iterator[None]:
    """Let this thread be a rank of another world while the body runs: how tests run ranks as threads."""
    token = _thread_world.set(other)
    try:
        yield
    finally:
        _thread_world.reset(token)


def rank() -> int:
    """This process's number in the job, 0 … size() - 1."""
    return world("rank()").topology.rank


def size() -> int:
    """The number of processes in the job."""
    return world("size()").topology.size


def local_rank() -> int:
    """This process's number among those of its host: which GPU to use."""
    return world("local_rank()").topology.local_rank


def local_size() -> int:
    """The number of processes on this host."""
    return world("local_size()").topology.local_size


def cross_rank() -> int:
    """This host's number among the hosts that have a process of this local rank."""
    return world("cross_rank()").topology.cross_rank


def cross_size() -> int:
    """The number of hosts that have a process of this local rank."""
    return world("cross_size()").topology.cross_size


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads at once. It may: `init` refuses an MPI that does not allow it."""
    world("mpi_threads_supported()")
    return True


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of processes."""
    return world("is_homogeneous()").topology.is_homogeneous


def describe() -> str:
    """The job in a few words, for the first line of a program's output: "4 ranks on 2 hosts (Open MPI v5.0.11)"."""
    return world("describe()").describe()


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record from now on what every rank does, and when: a Chrome trace, see docs/timeline.md. Every rank calls this.

    Args:
        file_path: The trace; rank 0's counts. Until `stop_timeline` (or the end of the job) merges them, the ranks' own files
            are in the folder ``<file_path>.ranks``.
        mark_cycles: Mark in it when the ranks agreed on what to run. Rank 0's counts.

    Raises:
        ArgumentError: A timeline is being recorded already, or a rank cannot write its file. Raised on all ranks.
        MismatchError: Another rank called something else.
    """
    world("start_timeline()").start_timeline(os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """End the recording: afterwards the trace is complete. Every rank calls this. Does nothing if none is recorded.

    Raises:
        HvdliteError: The trace could not be written. Raised on all ranks.
        MismatchError: Another rank called something else.
    """
    world("stop_timeline()").stop_timeline()


def add_process_set(process_set: ProcessSet | Iterable[int] | Any) -> ProcessSet:
    """Put a process set into effect. Every rank of the job calls this, with equal ranks.

    Args:
        process_set: The set, or its ranks; or an mpi4py communicator, of which each rank may pass another: all take effect.

    Returns:
        The set; with communicators, the one that this rank is in.

    Raises:
        ArgumentError: A rank is unknown or repeated, or a set of these ranks is in effect already.
        MismatchError: The ranks asked for different sets.
    """
    here = world("add_process_set()")
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    return here.groups.add(process_set) if process_set.communicator is None else _add_parts(here, process_set)


def _add_parts(here: World, process_set: ProcessSet) -> ProcessSet:
    """Add a set for each communicator that a rank passed."""
    from hvdlite.comm.mpi_job import members_of

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
        if part == (own or parts[0]):  # a rank in no part knows the first one, as one that it is not in
            process_set.take_ranks(ranks)
            here.groups.add(process_set)
        else:
            here.groups.add(ranks)
    return process_set


def new_group(ranks: Iterable[int]) -> ProcessSet:
    """Make a process set that is in effect at once, beside others of the same ranks. Every rank of the job calls this.

    Operations of different groups never meet, even if they have equal names and equal ranks: a library can have a group of its
    own. (`add_process_set` refuses a second set of equal ranks, as Horovod does.)

    Args:
        ranks: World ranks, in any order, each once; the same on every rank of the job. Ranks that are not among them call this
            as well.

    Returns:
        The set, for the argument `process_set` of operations and optimizers, and for `remove_process_set`.

    Raises:
        ArgumentError: A rank is unknown or repeated.
        MismatchError: The ranks of the job asked for different groups.
    """
    here = world("new_group()")
    if isinstance(ranks, ProcessSet):
        ranks = ranks.ranks
    if hasattr(ranks, "Get_group"):
        raise ArgumentError("new_group(communicator): expected world ranks; add_process_set() takes a communicator.")
    return here.groups.new(ranks)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Take a process set out of effect. Every rank of the job calls this.

    Returns:
        Whether it was in effect.

    Raises:
        ArgumentError: Operations of it are in flight.
    """
    return world("remove_process_set()").groups.remove(process_set)


def join(process_set: ProcessSet | None = None) -> int:
    """Say that this rank has run out of data, and wait until every rank has.

    Meanwhile it takes part in what the others do with the functions of this module, by name or not, and adds nothing:

    - `allreduce` and `reducescatter`: what changes no result of `op` (zeros for Sum, Adasum and Average, which still divides
      by the number of all ranks, as in Horovod);
    - `allgather` and `alltoall`: no rows; rows that others send to it are dropped;
    - `allgather_object`: None in its place of the list;
    - `broadcast` and `broadcast_object`: nothing; if it is the root, the call fails on all that make it;
    - `barrier`: it counts as present.

    What it had started before (``…_async``) it takes part in for real. What needs every rank fails on those that call it:
    `add_process_set`, `remove_process_set`, and the making of a `DistributedOptimizer`'s buffers.

    It also takes part in the steps of a `DistributedOptimizer`: an average of gradients is one of the ranks that have data. In
    the end every rank has the parameters and the optimizer state of the one that went furthest.

    Args:
        process_set: Take part in what the ranks of this set do; all ranks by default. Each set is joined by itself.

    Returns:
        The rank (its number within `process_set`) that was the last to join, the same on all. If some missed steps of an
        optimizer: the one that missed the fewest, and of these the one that has added up the most gradients since.

    Raises:
        HvdliteError: This rank has joined already, in another thread; or, raised by any other operation of the set, it has
            joined and other ranks have not.
        PeerLeftError: A rank has left the job without joining.
    """
    return world("join()").group(process_set).join()


# Operations: `_allreduce` prepares the call that `allreduce` carries out and `allreduce_async` starts; so for the others.


@dataclass(slots=True)
class Call(Generic[T]):
    """An operation ready to be submitted, whose result is a T.

    Attributes:
        engine: The engine that carries it out.
        operation: What it does.
        name: The name that the caller gave it, if any.
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
        tensor: Any shape, the same on every rank; or a list of tensors, exchanged as one.
        op: Sum, Average, Min, Max, Product or Adasum. float16 and bfloat16 are reduced as float32; averages of integers are
            rounded down; for bool, Min is 'all' and Max is 'any'. Adasum averages tensors that point the same way and
            adds orthogonal ones (arXiv:2006.02924); each tensor of a list by itself; floating-point numbers only.
        name: Calls of equal name belong together on all ranks; without names, calls belong together by their order.
        inplace: Overwrite `tensor` with the result.
        prescale_factor: Multiplies each rank's values before they are reduced.
        postscale_factor: Multiplies the result.
        algorithm: "auto", "mpi", "ring", "tree", "butterfly", "rabenseifner" or "parameter_server"; by default the setting
            ``HVDLITE_ALGORITHM``, which is "auto". Adasum has one of its own.
        process_set: The ranks that take part; all by default.

    Returns:
        The reduced tensor (or list) of the same kind, dtype and shape; `tensor` itself if `inplace`.

    Raises:
        UnsupportedTensorError: `tensor` is none, or is read-only and `inplace`, or `op` is not defined for its dtype.
        MismatchError: The ranks' calls do not belong together; raised on all of them.
        DuplicateNameError: `name` is in flight.
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
    """Start `allreduce` and return a `Handle` at once.

    ``handle.wait()`` returns what `allreduce` would, ``handle.poll()`` says whether it is there. Tensors must not be changed
    before. The arguments are those of `allreduce`.
    """
    call = _allreduce(tensor, op, name, inplace, prescale_factor, postscale_factor, algorithm, process_set)
    return call.engine.submit(call.operation, call.name)


def _allgather(tensor: T, name: str | None, process_set: ProcessSet | None) -> Call[T]:
    operation = Allgather(tensor)
    return Call(world("allgather()").engine(process_set), operation, name)


def allgather(tensor: T, name: str | None = None, *, process_set: ProcessSet | None = None) -> T:
    """Concatenate the ranks' tensors along the first dimension.

    Args:
        tensor: The first dimension may differ between ranks and may be 0; the others and the dtype are the same. Scalars count
            as vectors of one. Or a list of tensors.
        name: As in `allreduce`.
        process_set: As in `allreduce`.

    Returns:
        The rows of all ranks in rank order, on every rank.

    Raises:
        As `allreduce`.
    """
    call = _allgather(tensor, name, process_set)
    result: T = call.engine.run(call.operation, call.name)
    return result


def allgather_async(tensor: T, name: str | None = None, *, process_set: ProcessSet | None = None) -> Handle[T]:
    """Start `allgather` and return a `Handle` at once, as `allreduce_async` does; the arguments are those of `allgather`."""
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
        tensor: Of the same shape and dtype on every rank; or a list of tensors.
        root_rank: Whose values to send; its number within `process_set`.
        name: As in `allreduce`.
        inplace: Overwrite `tensor` with the result.
        process_set: As in `allreduce`.

    Returns:
        A tensor like the root's; `tensor` itself if `inplace`.

    Raises:
        ArgumentError: `root_rank` is not a rank of the set.
        Others: As `allreduce`.
    """
    call = _broadcast(tensor, root_rank, name, inplace, process_set)
    result: T = call.engine.run(call.operation, call.name)
    return result


def broadcast_async(
    tensor: T, root_rank: int, name: str | None = None, *, inplace: bool = False, process_set: ProcessSet | None = None
) -> Handle[T]:
    """Start `broadcast` and return a `Handle` at once, as `allreduce_async` does; the arguments are those of `broadcast`."""
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
    """Send a slice of the rows to each rank, and receive one from each.

    Args:
        tensor: At least 1-d; the first dimension may differ between ranks. Or a list of tensors.
        splits: For each rank, how many rows it gets (whole numbers that add up to the first dimension); equal shares if None.
        name: As in `allreduce`.
        process_set: As in `allreduce`.

    Returns:
        The rows received, in the order of their senders. With `splits`, a pair of these and how many came from each rank
        (int32, of the same kind as `tensor`).

    Raises:
        ArgumentError: `splits` does not fit.
        Others: As `allreduce`.
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
    """Start `alltoall` and return a `Handle` at once, as `allreduce_async` does; the arguments are those of `alltoall`."""
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
    """Reduce a tensor over the ranks, and keep this rank's share of the rows.

    Args:
        tensor: At least 1-d, of the same shape and dtype on every rank; or a list of tensors. Where the ranks do not divide the
            first dimension, the first ranks get one row more.
        op: As in `allreduce`, but not Adasum.
        name: As in `allreduce`.
        prescale_factor: As in `allreduce`.
        postscale_factor: As in `allreduce`.
        process_set: As in `allreduce`.

    Returns:
        This rank's rows of the reduced tensor.

    Raises:
        As `allreduce`.
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
    """Start `reducescatter` and return a `Handle` at once, as `allreduce_async` does.

    The arguments are those of `reducescatter`.
    """
    call = _reducescatter(tensor, op, name, prescale_factor, postscale_factor, process_set)
    return call.engine.submit(call.operation, call.name)


def _barrier(name: str | None, process_set: ProcessSet | None) -> Call[None]:
    return Call(world("barrier()").engine(process_set), Barrier(), name)


def barrier(name: str | None = None, *, process_set: ProcessSet | None = None) -> None:
    """Return when every rank has called it.

    Args:
        name: As in `allreduce`.
        process_set: As in `allreduce`.
    """
    call = _barrier(name, process_set)
    call.engine.run(call.operation, call.name)


def barrier_async(name: str | None = None, *, process_set: ProcessSet | None = None) -> Handle[None]:
    """Start `barrier` and return a `Handle` at once, as `allreduce_async` does; the arguments are those of `barrier`."""
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
        obj: Anything that can be pickled; only the root's matters.
        root_rank: As in `broadcast`.
        name: As in `allreduce`.
        process_set: As in `allreduce`.

    Returns:
        The root's object: a copy on the other ranks.
    """
    call = _broadcast_object(obj, root_rank, name, process_set)
    result: T = call.engine.run(call.operation, call.name)
    return result


def broadcast_object_async(
    obj: T, root_rank: int = 0, name: str | None = None, *, process_set: ProcessSet | None = None
) -> Handle[T]:
    """Start `broadcast_object` and return a `Handle` at once, as `allreduce_async` does.

    The arguments are those of `broadcast_object`.
    """
    call = _broadcast_object(obj, root_rank, name, process_set)
    return call.engine.submit(call.operation, call.name)


def _allgather_object(obj: T, name: str | None, process_set: ProcessSet | None) -> Call[list[T]]:
    return Call(world("allgather_object()").engine(process_set), AllgatherObject(obj), name)


def allgather_object(obj: T, name: str | None = None, *, process_set: ProcessSet | None = None) -> list[T]:
    """Give every rank everybody's object.

    Args:
        obj: Anything that can be pickled.
        name: As in `allreduce`.
        process_set: As in `allreduce`.

    Returns:
        The objects by rank (copies).
    """
    call = _allgather_object(obj, name, process_set)
    result: list[T] = call.engine.run(call.operation, call.name)
    return result


def allgather_object_async(
    obj: T, name: str | None = None, *, process_set: ProcessSet | None = None
) -> Handle[list[T]]:
    """Start `allgather_object` and return a `Handle` at once, as `allreduce_async` does.

    The arguments are those of `allgather_object`.
    """
    call = _allgather_object(obj, name, process_set)
    return call.engine.submit(call.operation, call.name)
