"""``horovod.run`` is `hvdlite.run` with the arguments of Horovod's function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hvdlite.errors import ArgumentError
from hvdlite.launch.horovod import job_environment
from hvdlite.launch.run_function import run as run_function

T = TypeVar("T")


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[float] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | Sequence[str] | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[T]:
    """Run a function in several ranks, and return what it returned in each, rank 0's result first.

    The ranks use MPI, whatever `use_gloo` and `use_mpi` say. Nothing is cached, so `disable_cache` changes nothing. The other
    arguments are those of `hvdlite.run`, except that one rank runs if no number is given. `np`, `min_np`,
    `max_np` and `network_interface` are old names of `num_proc`, `min_num_proc`, `max_num_proc` and `network_interfaces`. All
    exceptions of `hvdlite.run` can be raised too.

    Raises:
        ArgumentError: `use_gloo` and `use_mpi` are both true, or `network_interface` and `network_interfaces` are both given.
    """
    fewest = min_np if min_num_proc is None else min_num_proc
    most = max_np if max_num_proc is None else max_num_proc
    if use_gloo and use_mpi:
        raise ArgumentError(
            "use_gloo=True and use_mpi=True: give one of them at most (ranks speak by MPI in any case)."
        )
    if network_interface is not None and network_interfaces is not None:
        raise ArgumentError("network_interface and network_interfaces: they mean the same, give one.")
    interfaces = network_interface if network_interfaces is None else network_interfaces
    not_given = num_proc == 1 and (np is not None or fewest is not None)
    return run_function(
        func,
        args,
        kwargs,
        num_proc=None if not_given else num_proc,
        np=np,
        hosts=hosts,
        hostfile=hostfile,
        start_timeout=start_timeout,
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        output_filename=output_filename,
        verbose=bool(verbose),
        mpi_args=mpi_args,
        network_interface=interfaces if interfaces is None or isinstance(interfaces, str) else ",".join(interfaces),
        executable=executable,
        env=job_environment(),
        min_num_proc=fewest,
        max_num_proc=most,
        slots=slots,
        reset_limit=reset_limit,
        cooldown_range=cooldown_range,
        host_discovery_script=host_discovery_script,
    )
