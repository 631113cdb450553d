"""This file lists the flags that horovodrun has and hvdliterun has not.

hvdliterun accepts most of them without effect. It refuses the others, and says what to do instead.
"""

from __future__ import annotations

from dataclasses import dataclass

_NO_CYCLE = "there is no cycle, operations run when all ranks are ready"
_HIERARCHICAL = "exchanges go inside hosts first wherever that can be"
_AUTOTUNE = "the search has no such parameter"
_LOG = "hvdlite writes no log, problems are raised or printed"
_STREAMS = "GPU tensors have a stream of their own, and NCCL's settings decide the rest (hvdlite docs gpu)"


@dataclass(frozen=True)
class Flag:
    """One flag of horovodrun.

    Attributes:
        takes_value: A value follows the flag.
        is_taken: hvdliterun accepts the flag, and prints that it has no effect. Otherwise hvdliterun refuses the flag.
        why: Why the flag has no effect, or what to do instead.
    """

    takes_value: bool
    is_taken: bool
    why: str


def _taken(names: str, why: str, takes_value: bool = False) -> dict[str, Flag]:
    return {name: Flag(takes_value, True, why) for name in names.split()}


def _refused(names: str, why: str, takes_value: bool = False) -> dict[str, Flag]:
    return {name: Flag(takes_value, False, why) for name in names.split()}


FLAGS: dict[str, Flag] = {
    **_taken("--disable-cache", "launch checks are not cached"),
    **_taken("--cycle-time-ms", _NO_CYCLE, takes_value=True),
    **_taken("--cache-capacity", "what was agreed once is remembered without limit", takes_value=True),
    **_taken(
        "--hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather --no-hierarchical-allgather "
        "--torus-allreduce --no-torus-allreduce",
        _HIERARCHICAL,
    ),
    **_taken("--no-autotune", "the search is off unless asked for"),
    **_taken(
        "--autotune-warmup-samples --autotune-steps-per-sample --autotune-bayes-opt-max-samples "
        "--autotune-gaussian-process-noise",
        _AUTOTUNE,
        takes_value=True,
    ),
    **_taken("--mpi-threads-disable --no-mpi-threads-disable", "MPI is asked for threads in any case"),
    **_taken("--tcp", "on one machine ranks share memory, between hosts --mpi-args chooses the network"),
    **_taken("--num-nccl-streams", _STREAMS, takes_value=True),
    **_taken("--thread-affinity", "there is no background thread to bind", takes_value=True),
    **_taken("--gloo-timeout-seconds", "there is no Gloo, ranks speak by MPI", takes_value=True),
    **_taken("--gloo", "there is no Gloo, ranks speak by MPI"),
    **_taken("--log-level", _LOG, takes_value=True),
    **_taken("--log-with-timestamp --log-without-timestamp --log-hide-timestamp --no-log-hide-timestamp", _LOG),
    **_refused("--config-file", "give the flags themselves", takes_value=True),
    **_refused("--jsrun", "use mpirun or srun by hand; hvdlite.init() finds its place"),
}
"""The flags by their spelling, such as "--cycle-time-ms"."""
