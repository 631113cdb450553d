"""The settings of one process. Only this file reads them from ``os.environ``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hvdlite.errors import ArgumentError
from hvdlite.ranks.log import LEVELS

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}


@dataclass(frozen=True)
class Config:
    """Settings, each read from ``HVDLITE_<FIELD>`` or else from ``HOROVOD_<FIELD>``.

    Attributes:
        fusion_threshold: Tensors that are ready together share one exchange of at most so many bytes.
        bucket_bytes: So many bytes of gradients go between hosts at a time.
        between_hosts: What carries large data between hosts: "mpi"; "sockets", which are connections of hvdlite's own; or
            "auto": sockets, unless the hosts have a fabric that MPI drives itself, or cannot connect to each other.
        ports: The ports for these connections, as in "31000-31100", if a firewall lets only some through: one for each rank of
            a host. Empty for any.
        overlap: Exchange gradients during the backward pass: "on", "off", or "auto", which does so if ranks have a core to
            spare.
        autotune: Search in the first steps for the fastest way to exchange gradients.
        autotune_log: The path of a CSV file that records this search; empty for none.
        advice: Warn at the first step of ranks that start with different weights, read the same data, or have a default
            learning rate.
        keep_memory: `DistributedOptimizer` of torch tells the C library to keep freed memory, for the whole process. Steps are
            faster, and the process holds the most that it has had so far. If false, glibc's malloc stays as it is.
        huge_pages: ``import hvdlite_torch`` lets torch ask Linux for huge pages, for host tensors of 2 MiB and more, if
            the program has not made a tensor before. Steps of large models are faster. If false, torch decides.
        shared_memory: Let the ranks of a host exchange data through shared memory; if false, they send messages.
        algorithm: The algorithm of ``allreduce`` if the call names none: "auto", "shared_memory", "mpi", "ring", "tree",
            "butterfly", "rabenseifner" or "parameter_server".
        timeline: The path of the timeline to write; empty for none. With "DYNAMIC", Horovod's word, the program starts the
            timeline by `start_timeline`.
        timeline_mark_cycles: Mark the moments in the timeline at which the ranks agreed on the operations to run.
        stall_check_disable: Do not look for ranks that wait for each other.
        stall_check_time_seconds: After so many seconds in one wait, print which ranks are missing, and where they are.
        stall_shutdown_time_seconds: After so many seconds in one wait, end the job; 0 means never.
        stopped_seconds: A rank that is stopped (SIGSTOP) for so many seconds has failed: hvdliterun ends the job.
        deadlock_time_seconds: If all ranks wait for so many seconds, each for an operation that another rank has not
            submitted, raise an error on them.
        nccl: Exchange GPU tensors by NCCL (or RCCL) if it is installed; if false, exchange them through host memory.
        nccl_library: The path of the NCCL library; empty to search for it.
        nccl_start_seconds: The ranks try for so many seconds to connect by NCCL.
        share_gpu: Several ranks may use one GPU.
        log_level: The level from which on hvdlite makes records of `logging`: trace, debug, info, warning, error or fatal;
            empty to leave that to the program (see `hvdlite.ranks.log`).
        servers: The last so many ranks only serve the parameters of `AsyncDistributedOptimizer`; 0 if the ranks are alike.
        advise: What to measure of the training; ``hvdlite advise`` sets it (see `hvdlite.tools.advise.recorder.Request`).
        generation: Which generation of an elastic job this process is of; hvdliterun sets it; empty if the job is not elastic.
        pulse: Tell hvdliterun once a second what this rank does; ``hvdliterun --dashboard`` sets it.
        control: ``host:port:secret`` of the launcher that started this process; hvdliterun sets it.

    Raises:
        ArgumentError: `between_hosts`, `ports`, `overlap` or `log_level` has another value, or `servers` is negative.
    """

    fusion_threshold: int = 64 * 2**20
    bucket_bytes: int = 25 * 2**20
    between_hosts: str = "mpi"
    ports: str = ""
    overlap: str = "auto"
    autotune: bool = False
    autotune_log: str = ""
    advice: bool = True
    keep_memory: bool = True
    huge_pages: bool = True
    shared_memory: bool = True
    algorithm: str = "auto"
    timeline: str = ""
    timeline_mark_cycles: bool = False
    stall_check_disable: bool = False
    stall_check_time_seconds: float = 60.0
    stall_shutdown_time_seconds: float = 1800.0
    stopped_seconds: float = 10.0
    deadlock_time_seconds: float = 2.0
    nccl: bool = True
    nccl_library: str = ""
    nccl_start_seconds: float = 120.0
    share_gpu: bool = False
    log_level: str = ""
    servers: int = 0
    advise: str = ""
    generation: str = ""
    pulse: bool = False
    control: str = ""

    def __post_init__(self) -> None:
        if self.between_hosts not in ("auto", "mpi", "sockets"):
            raise ArgumentError(f"HVDLITE_BETWEEN_HOSTS={self.between_hosts!r}: expected auto, mpi or sockets.")
        if self.port_range.stop > 65536 or not self.port_range:
            raise ArgumentError(
                f"HVDLITE_PORTS={self.ports!r}: expected two numbers from 1 to 65535, such as 31000-31100."
            )
        if self.overlap not in ("auto", "on", "off"):
            raise ArgumentError(f"HVDLITE_OVERLAP={self.overlap!r}: expected auto, on or off.")
        if self.log_level.lower() not in ("", *LEVELS):
            raise ArgumentError(f"HVDLITE_LOG_LEVEL={self.log_level!r}: expected one of {', '.join(LEVELS)}.")
        if self.servers < 0:
            raise ArgumentError(f"HVDLITE_SERVERS={self.servers}: expected how many ranks only serve, 0 or more.")

    @property
    def port_range(self) -> range:
        """The ports of `ports`; 0, which is any, if that is empty. The range is empty if `ports` has another form."""
        if not self.ports:
            return range(1)
        first, _, last = self.ports.partition("-")
        return range(int(first), int(last) + 1) if first.isdecimal() and last.isdecimal() and int(first) else range(0)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Config:
        """Read the settings from environment variables, by default those of this process.

        Raises:
            ArgumentError: The value of a variable is not of its type, or its setting does not exist any more.
        """
        for removed, advice in _REMOVED.items():
            if environ.get(removed, "").lower() not in _FALSE | {""}:
                raise ArgumentError(f"{removed}={environ[removed]}: {advice}")
        values: dict[str, Any] = {}
        for field in fields(cls):
            variable = variable_of(field.name, environ)
            if variable is not None:
                values[field.name] = _parse(variable, environ[variable], type(field.default))
        return cls(**values)


def variable_of(setting: str, environ: Mapping[str, str]) -> str | None:
    """Return the name of the environment variable that sets a setting, ours before Horovod's; None if neither is there."""
    names = (prefix + setting.upper() for prefix in ("HVDLITE_", "HOROVOD_"))
    return next((name for name in names if name in environ), None)


_REMOVED = {
    "HVDLITE_MPI_GPU": "hvdlite does not hand GPU tensors to MPI any more. Take this variable away: they go by NCCL "
    "(pip install nvidia-nccl-cu13), or through host memory where there is none (HVDLITE_NCCL=0).",
}


def _parse(variable: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise ArgumentError(f"{variable}={text!r}: expected one of 1, 0, true, false, yes, no, on, off.")
    try:
        return kind(text)
    except ValueError:
        raise ArgumentError(f"{variable}={text!r}: expected {kind.__name__}.") from None


def is_task_of_srun(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether Slurm's srun has started this process itself, and not a daemon of mpirun that srun has started."""
    return "SLURM_STEP_ID" in environ and not {"OMPI_COMM_WORLD_SIZE", "HVDLITE_CONTROL"} & set(environ)


def environment(changes: Mapping[str, str] | None = None, **defaults: str) -> dict[str, str]:
    """Return the environment variables of this process, for a process that it starts.

    Args:
        changes: Variables that have other values there.
        defaults: Variables that are added if they are not set.
    """
    return {**defaults, **os.environ, **(changes or {})}


def set_default(variable: str, value: str) -> None:
    """Set an environment variable of this process, which another library reads, unless the user has set it."""
    os.environ.setdefault(variable, value)
