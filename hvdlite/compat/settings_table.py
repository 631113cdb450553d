"""Notes on the environment variables of Horovod and the flags of horovodrun that hvdlite does not have under their names.

This file holds data only. `hvdlite.compat.status` reads it, and finds out by itself which names hvdlite has.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite.compat.table import Note, words
from hvdlite.launch import horovod_flags

RANK_VARIABLES = words("""
    HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE HOROVOD_CROSS_RANK HOROVOD_CROSS_SIZE HOROVOD_HOSTNAME
""")
"""The variables that hvdliterun --horovod sets for each rank."""

_NO_CYCLE = Note("changed", "no effect: there is no cycle, operations run when all ranks are ready")
_NO_GLOO = Note("changed", "no effect: there is no Gloo, ranks speak by MPI")
_NO_BUILD = Note("changed", "no effect: nothing is compiled")
_STREAMS = Note(
    "changed",
    "no effect: GPU tensors have a stream of their own, and NCCL's settings decide the rest (hvdlite docs gpu)",
)
_HIERARCHICAL = Note("changed", "no effect: exchanges go inside hosts first wherever that can be")
_LOG = Note("changed", "no effect: the format of Python's logging decides that (hvdlite docs running)")
_AUTOTUNE = Note("changed", "no effect: the search has no such parameter")
_ELASTIC = Note(
    "changed", "no effect: hvdliterun --min-np and its other options of elastic jobs (hvdlite docs elastic)"
)

VARIABLES: dict[str, Note] = {
    **{
        name: Note("changed", "set by hvdliterun --horovod; under other launchers use hvd.rank() and the like")
        for name in RANK_VARIABLES
    },
    "HOROVOD_CYCLE_TIME": _NO_CYCLE,
    "HOROVOD_CACHE_CAPACITY": Note("changed", "no effect: what was agreed once is remembered without limit"),
    "HOROVOD_HIERARCHICAL_ALLREDUCE": _HIERARCHICAL,
    "HOROVOD_HIERARCHICAL_ALLGATHER": _HIERARCHICAL,
    "HOROVOD_TORUS_ALLREDUCE": _HIERARCHICAL,
    "HOROVOD_BATCH_D2D_MEMCOPIES": _STREAMS,
    "HOROVOD_NUM_NCCL_STREAMS": _STREAMS,
    "HOROVOD_ENABLE_ASYNC_COMPLETION": _STREAMS,
    "HOROVOD_DISABLE_NVTX_RANGES": _STREAMS,
    "HOROVOD_ENABLE_XLA_OPS": Note("missing", "XLA cannot compile the exchange: pass jit_compile=False"),
    "HOROVOD_DISABLE_GROUP_FUSION": Note("changed", "no effect: set HVDLITE_FUSION_THRESHOLD=0 to fuse nothing"),
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": Note("changed", "no effect"),
    "HOROVOD_DYNAMIC_PROCESS_SETS": Note("changed", "no effect: process sets can always be added and removed"),
    "HOROVOD_THREAD_AFFINITY": Note("changed", "no effect: there is no background thread to bind"),
    "HOROVOD_MPI_THREADS_DISABLE": Note("changed", "no effect"),
    "HOROVOD_CPU_OPERATIONS": _NO_GLOO,
    "HOROVOD_CONTROLLER": _NO_GLOO,
    "HOROVOD_GLOO_IFACE": _NO_GLOO,
    "HOROVOD_GLOO_TIMEOUT_SECONDS": _NO_GLOO,
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": _NO_GLOO,
    "HOROVOD_GLOO_RENDEZVOUS_PORT": _NO_GLOO,
    "HOROVOD_CCL_CACHE": Note("changed", "no effect: oneCCL is not used"),
    "HOROVOD_LOG_HIDE_TIME": _LOG,
    **{
        f"HOROVOD_AUTOTUNE_{name}": _AUTOTUNE
        for name in words("WARMUP_SAMPLES STEPS_PER_SAMPLE BAYES_OPT_MAX_SAMPLES GAUSSIAN_PROCESS_NOISE")
    },
    "HOROVOD_START_TIMEOUT": Note("changed", "no effect: hvdliterun --start-timeout"),
    "HOROVOD_ELASTIC": _ELASTIC,
    "HOROVOD_ELASTIC_TIMEOUT": _ELASTIC,
    "HOROVOD_SPARK_START_TIMEOUT": Note("missing", "Spark is not supported"),
    **{
        f"HOROVOD_{name}": _NO_BUILD
        for name in words("""
           WITH_TENSORFLOW WITH_PYTORCH WITH_MXNET WITH_MPI WITH_GLOO WITHOUT_TENSORFLOW WITHOUT_PYTORCH WITHOUT_MXNET
           WITHOUT_MPI WITHOUT_GLOO GPU GPU_OPERATIONS GPU_ALLREDUCE GPU_ALLGATHER GPU_BROADCAST GPU_ALLTOALL
           GPU_REDUCESCATTER ALLOW_MIXED_GPU_IMPL NCCL_HOME NCCL_INCLUDE NCCL_LIB NCCL_LINK CUDA_HOME ROCM_HOME
           BUILD_CUDA_CC_LIST BUILD_ARCH_FLAGS CMAKE DEBUG SKIP_COMPILE MIXED_INSTALL
       """)
    },
}
"""The notes on environment variables of Horovod that are no settings in `hvdlite.config`."""


@dataclass(frozen=True)
class HorovodrunFlag:
    """A flag of horovodrun.

    Attributes:
        values: How many values follow the flag.
        note: What the user should know if hvdliterun has no flag of this name, or has one with another meaning.
    """

    values: int
    note: Note


def _flags(names: str, note: Note, values: int = 0) -> dict[str, HorovodrunFlag]:
    return {name: HorovodrunFlag(values, note) for name in names.split()}


_SAME = Note("missing", "hvdliterun has none")

FLAGS: dict[str, HorovodrunFlag] = {
    **_flags("-v --version -cb --check-build --verbose --autotune --stall-check --no-stall-check", _SAME),
    **_flags("--timeline-mark-cycles --no-timeline-mark-cycles", _SAME),
    **_flags("-prefix-timestamp --prefix-output-with-timestamp", _SAME),
    **_flags("--mpi", Note("changed", "no effect: ranks speak by MPI (--mpi openmpi or --mpi mpich chooses which)")),
    **_flags(
        """-np --num-proc -H --hosts -hostfile --hostfile -p --ssh-port -i --ssh-identity-file --start-timeout --mpi-args
        --network-interface --network-interfaces --output-filename --fusion-threshold-mb --autotune-log-file
        --stall-check-warning-time-seconds --stall-check-shutdown-time-seconds --timeline-filename --binding-args
        --min-np --min-num-proc --max-np --max-num-proc --host-discovery-script --slots-per-host --reset-limit
        --elastic-timeout""",
        _SAME,
        values=1,
    ),
    **_flags("--blacklist-cooldown-range", _SAME, values=2),
    **{
        name: HorovodrunFlag(
            int(flag.takes_value),
            Note("changed", f"no effect: {flag.why}") if flag.is_taken else Note("missing", flag.why),
        )
        for name, flag in horovod_flags.FLAGS.items()
    },
}
"""The flags of horovodrun by their spelling."""
