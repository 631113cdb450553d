"""``hvdlite.run`` starts a job that calls a function instead of a program, and returns the function's results by rank."""

from __future__ import annotations

import argparse
import contextlib
import math
import numbers
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hvdlite.checks import check_count, is_whole
from hvdlite.config import Config
from hvdlite.errors import ArgumentError, LaunchError, WorkerError
from hvdlite.launch.cli import check_not_nested, find_hosts, make_folder
from hvdlite.launch.elastic.options import ElasticOptions, elastic_options, is_elastic
from hvdlite.launch.job.failures import Failure
from hvdlite.launch.job.job import Job, JobSpec
from hvdlite.launch.job.mpi import Placement, find_mpi
from hvdlite.launch.job.output import Output, Sink, TextSink
from hvdlite.launch.worker import FILE as WORKER
from hvdlite.launch.worker.rank_environment import own_rank
from hvdlite.launch.worker.shared_memory import new_directory
from hvdlite.launcher_link.link import Address, request
from hvdlite.launcher_link.session import Message

T = TypeVar("T")


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    env: Mapping[str, str] | None = None,
    np: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[float] | None = None,
    host_discovery_script: str | None = None,
    elastic_timeout: float | None = None,
) -> list[T]:
    """Run a function in several ranks, and return what it returned in each.

    cloudpickle sends the function to the ranks, so that it may be a lambda, a closure, or a function of a notebook.
    The function need not call ``hvdlite.init()``.

    With `min_num_proc`, `max_num_proc` or `host_discovery_script` the job is elastic: the function, or what it calls, is made
    so by `hvdlite.elastic.run`, and is called again in every generation of the job.

    Args:
        fn: The function that each rank calls.
        args: The positional arguments of the function, the same on every rank.
        kwargs: The keyword arguments of the function, the same on every rank.
        num_proc: The number of ranks; if it is not given, `min_num_proc`, or else 2.
        hosts: The hosts and their slots, such as "node1:4,node2:4", as for ``hvdliterun -H``. If neither `hosts` nor
            `hostfile` is given, the hosts are those of the scheduler's allocation, or else this machine alone.
        hostfile: The path of a file with lines "host slots=N", as for ``hvdliterun --hostfile``.
        start_timeout: Seconds until every rank must have started; 30 if not given.
        ssh_port: The port of ssh on the hosts; ssh's own default if not given.
        ssh_identity_file: The path of a private key for ssh.
        output_filename: A folder that gets a copy of each rank's output.
        verbose: Show the command line of the MPI launcher, and what the launcher prints.
        mpi_args: More arguments for the MPI launcher, in one string as for a shell.
        network_interface: The network interfaces that all hosts share, separated by commas.
        executable: The Python interpreter of the ranks; the one of this process if not given.
        env: The environment of the ranks; the one of this process if not given.
        np: Another name for ``num_proc``.
        min_num_proc: An elastic job goes on with so many ranks or more, as for ``hvdliterun --min-np``.
        max_num_proc: It uses so many ranks at most, as for ``--max-np``.
        slots: The slots of a host for which the script prints no number, as for ``--slots-per-host``.
        reset_limit: It starts again so many times at most, as for ``--reset-limit``.
        cooldown_range: For so many seconds, at least and at most, a host is set aside after a failure, as for
            ``--blacklist-cooldown-range``.
        host_discovery_script: A command that prints the hosts, as for ``--host-discovery-script``.
        elastic_timeout: It waits so many seconds for enough hosts, as for ``--elastic-timeout``.

    Returns:
        What the function returned on each rank, rank 0's result first; None for a rank without which the others have gone on
        (``AsyncDistributedOptimizer(on_worker_loss="go on")``), with a warning that says why it has failed. In an elastic job,
        the ranks are those of its last generation.

    Raises:
        ArgumentError: An argument is not of its type, `num_proc` and `np` differ, `hosts` and `hostfile` are both given, or
            `num_proc` is less than `min_num_proc` or more than `max_num_proc`.
        LaunchError: The job could not be started.
        WorkerError: A rank was killed or left with ``sys.exit``, or its result or its exception cannot be pickled.
        KeyboardInterrupt: The user pressed Ctrl-C. All ranks have been ended.
        Exception: The exception that ``fn`` raised on the rank that failed first. The ``WorkerError`` that is its cause
            shows the traceback of that rank.

    Examples:
        >>> def program(x):
        ...     hvdlite.init()
        ...     return x + hvdlite.rank(), hvdlite.size()
        >>> hvdlite.run(program, (10,), num_proc=2)  # these ranks are processes
        [(10, 2), (11, 2)]
    """
    if num_proc is not None and np is not None and num_proc != np:
        raise ArgumentError(f"num_proc={num_proc} and np={np}: they mean the same, give one.")
    if not isinstance(args, Sequence):
        hint = f" Did you mean hvdlite.run(fn, num_proc={args})?" if isinstance(args, int) else ""
        raise ArgumentError(f"args={args!r}: expected a list or tuple of the function's arguments.{hint}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ArgumentError(f"kwargs={kwargs!r}: expected a dictionary of the function's keyword arguments.")
    if not callable(fn):
        raise ArgumentError(f"expected a function; got a {type(fn).__name__}. Start programs with hvdliterun.")
    size = num_proc if num_proc is not None else np
    for name, count in (
        ("num_proc", size),
        ("min_num_proc", min_num_proc),
        ("max_num_proc", max_num_proc),
        ("slots", slots),
    ):
        if count is not None:
            check_count(name, count)
    _check_range(size, min_num_proc, max_num_proc)
    _check_elastic(reset_limit, cooldown_range, host_discovery_script, elastic_timeout)
    if hosts is not None and hostfile is not None:
        raise ArgumentError(f"hosts={hosts!r} and hostfile={hostfile!r}: both name the hosts, give one.")
    environ = dict(os.environ if env is None else env)
    check_not_nested(os.environ)
    options = argparse.Namespace(
        num_proc=size,
        min_np=min_num_proc,
        max_np=max_num_proc,
        hosts=hosts,
        hostfile=hostfile,
        host_discovery_script=host_discovery_script,
        slots_per_host=slots,
        reset_limit=reset_limit,
        elastic_timeout=elastic_timeout,
        blacklist_cooldown_range=cooldown_range,
        commit_directory=None,
        always_restart=None,
        same_failure_limit=None,
        state=None,
        state_every=None,
        servers=None,
    )
    elastic = elastic_options(options, os.environ) if is_elastic(options) else None
    size = elastic.limits.first if elastic is not None else size or 2
    mpi = find_mpi()
    found = elastic.found if elastic is not None else find_hosts(hosts, hostfile, size, os.environ)
    spec = JobSpec(
        mpi=mpi,
        placement=Placement(
            num_proc=size,
            hosts=found.hosts,
            scheduler=found.scheduler,
            by_ssh=found.by_ssh,
            interfaces=network_interface,
            ssh_port=ssh_port,
            ssh_identity_file=ssh_identity_file,
            mpi_args=mpi_args or "",
            shared_directory=new_directory(mpi.flavour),
        ),
        program=_program(executable or sys.executable),
        environ={**environ, **found.environ},
        start_timeout=30.0 if start_timeout is None else start_timeout,
        verbose=bool(verbose),
        function=_dumps((list(sys.path), _dumps((fn, tuple(args), dict(kwargs or {}))))),
    )
    tagged = elastic is not None or size > 1
    output = Output(_sink(1), _sink(2), tagged=tagged, directory=make_folder(output_filename))
    try:
        job, failure = _run(spec, output, elastic)
    finally:
        output.close()
    if failure is not None:
        _raise(failure, job.results if job is not None else {})
    assert job is not None  # one without a failure has run
    lost = {loss.rank for loss in job.trainings.losses}
    if lost:
        warnings.warn(job.trainings.describe().rstrip(), RuntimeWarning, stacklevel=2)
    everybody = job.ranks.left if elastic is not None else range(job.num_proc)
    if missing := sorted(set(everybody) - lost - set(job.results)):
        raise WorkerError(f"rank {', '.join(map(str, missing))} left with sys.exit(0), so there is no result.")
    results: list[Any] = [None if rank in lost else pickle.loads(job.results[rank][1]) for rank in everybody]
    return results


def _check_range(size: int | None, fewest: int | None, most: int | None) -> None:
    """Raise ArgumentError unless the numbers of ranks are in order."""
    given = {"min_num_proc": fewest, "num_proc": size, "max_num_proc": most}
    ordered = [number for number in given.values() if number is not None]
    if ordered != sorted(ordered):
        words = ", ".join(f"{name}={number}" for name, number in given.items() if number is not None)
        raise ArgumentError(f"{words}: expected min_num_proc <= num_proc <= max_num_proc.")


def _check_elastic(limit: object, cooldown: object, script: object, timeout: object) -> None:
    """Raise ArgumentError unless these arguments are what the options of hvdliterun can be. None stands for the default."""
    if limit is not None and (not is_whole(limit) or limit < 0):  # type: ignore[operator]
        raise ArgumentError(f"reset_limit={limit!r}: expected a whole number from 0 on.")
    if cooldown is not None and not (
        isinstance(cooldown, Sequence) and len(cooldown) == 2 and all(map(_is_positive, cooldown))
    ):
        raise ArgumentError(f"cooldown_range={cooldown!r}: expected two numbers of seconds above 0, such as (10, 300).")
    if script is not None and not isinstance(script, str):
        raise ArgumentError(f"host_discovery_script={script!r}: expected a command, in one string as for a shell.")
    if timeout is not None and not _is_positive(timeout):
        raise ArgumentError(f"elastic_timeout={timeout!r}: expected a number of seconds above 0.")


def _is_positive(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 < float(value) < math.inf


def _run(spec: JobSpec, output: Output, elastic: ElasticOptions | None) -> tuple[Job | None, Failure | None]:
    """Run a job. Return it, or the last generation of an elastic one, and the failure that has ended it."""
    if elastic is not None:
        return elastic.run(spec, output)
    job = Job(spec, output)
    return job, job.run()


def _sink(descriptor: int) -> Sink:
    stream = sys.stdout if descriptor == 1 else sys.stderr
    stream.flush()
    try:
        if stream.fileno() == descriptor:
            return Sink(descriptor)
    except (OSError, AttributeError):  # a notebook, or a test that captures output
        pass
    return TextSink(stream)


def _program(executable: str) -> list[str]:
    root = str(Path(__file__).parent.parent.parent)
    # The root goes last on the path: it matters only where hvdlite is not installed there.
    code = f"import sys; sys.path.append({root!r}); from hvdlite.launch.run_function import work; work()"
    return [executable, WORKER, "-c", code]


def _dumps(value: object) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        raise LaunchError("hvdlite.run needs cloudpickle: pip install cloudpickle") from None
    data: bytes = cloudpickle.dumps(value)
    return data


def _raise(failure: Failure, results: Mapping[int, tuple[bool, bytes]]) -> None:
    if failure.code == 130 and failure.rank is None:
        raise KeyboardInterrupt
    good, data = results.get(-1 if failure.rank is None else failure.rank, (True, b""))
    if failure.rank is None or good:
        raise WorkerError(failure.describe().rstrip())
    remote = WorkerError(f"on rank {failure.rank}, host {failure.host}:\n{failure.text.rstrip()}")
    error = None
    with contextlib.suppress(Exception):  # the class of the exception may need a module that only the rank has
        error = pickle.loads(data)
    if not isinstance(error, BaseException):
        raise remote
    raise error from remote


def work() -> None:
    """Run one rank of `hvdlite.run`: get the function from the launcher, call it, and send its result or exception back."""
    address = Address.parse(Config.from_env().control)
    rank = own_rank()
    path, call = pickle.loads(request(address, Message("fetch", {"rank": rank})).payload)
    sys.path += [entry for entry in path if entry not in sys.path]  # the function's module may be there only
    fn, args, kwargs = pickle.loads(call)
    try:
        result = fn(*args, **kwargs)
    except Exception as error:
        _send(address, rank, False, _pickled_error(error))
        raise
    try:
        data = _dumps(result)
    except Exception as error:
        kind = f"{type(result).__module__}.{type(result).__qualname__}"
        raise WorkerError(
            f"rank {rank}'s result, of type {kind}, cannot be pickled: {type(error).__name__}: {error}"
        ) from None
    _send(address, rank, True, data)


def _send(address: Address, rank: int, good: bool, data: bytes) -> None:
    request(address, Message("result", {"rank": rank, "ok": good}, data))


def _pickled_error(error: Exception) -> bytes:
    """Pickle an exception. Return no bytes if it cannot be pickled, or cannot be unpickled again."""
    try:
        data = _dumps(error)
        pickle.loads(data)
    except Exception:
        print("".join(traceback.format_exception_only(error)).rstrip(), "cannot be pickled", file=sys.stderr)
        return b""
    return data
