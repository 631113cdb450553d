"""Before init, settings, topology, and environments that promise more than MPI has."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdlite as hvd
from hvdlite.config import Config
from hvdlite.errors import ArgumentError, HvdliteError, NotInitializedError, UnsupportedTensorError
from hvdlite.ranks.topology import Topology
from hvdlite.testing import on_ranks

X = np.ones(2)
CALLS = [
    *(
        hvd.rank,
        hvd.size,
        hvd.local_rank,
        hvd.local_size,
        hvd.cross_rank,
        hvd.cross_size,
        hvd.is_homogeneous,
        hvd.barrier,
        hvd.join,
    ),
    *(lambda: hvd.allreduce(X), lambda: hvd.allgather_async(X), lambda: hvd.broadcast(X, 0), lambda: hvd.alltoall(X)),
    *(lambda: hvd.reducescatter(X), lambda: hvd.broadcast_object(1), lambda: hvd.allgather_object(1)),
    *(lambda: hvd.add_process_set([0]), lambda: hvd.allreduce(X, process_set=hvd.global_process_set)),
]


@pytest.mark.parametrize("call", CALLS)
def test_calls_before_init_say_so(call: object) -> None:
    assert not hvd.is_initialized()
    with pytest.raises(NotInitializedError, match=r"needs hvdlite.init\(\) first"):
        call()  # type: ignore[operator]
    assert hvd.global_process_set.size() is None


def test_one_plain_process_is_a_job_of_its_own() -> None:
    code = (
        "import numpy as np, hvdlite as hvd; hvd.init(); hvd.init(); x = np.arange(3.0)\n"
        "assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size()) == (0, 1, 0, 1) and hvd.is_homogeneous()\n"
        "assert (hvd.allreduce(x) == x).all() and hvd.allgather_object(1) == [1]\n"
        "hvd.shutdown(); hvd.shutdown(); assert not hvd.is_initialized()\n"
        "hvd.init(process_sets=[]); assert hvd.allreduce(x, hvd.Sum)[2] == 2; print('done')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize(
    ("environ", "texts"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4"}, ["OMPI_COMM_WORLD_SIZE=4", "mpirun", "another MPI library"]),
        ({"PMI_SIZE": "2"}, ["PMI_SIZE=2", "another MPI library"]),
        ({"SLURM_STEP_NUM_TASKS": "3"}, ["srun --mpi=pmix"]),
        ({"SLURM_NTASKS": "3", "SLURM_STEP_ID": "0"}, ["srun --mpi=pmix"]),
        ({"PMI_SIZE": "3", "SLURM_STEP_NUM_TASKS": "3"}, ["srun started 3", "srun --mpi=pmix"]),  # srun --mpi=pmi2
        ({"WORLD_SIZE": "8", "RANK": "3"}, ["torchrun", "hvdliterun -np 8"]),
    ],
)
def test_a_promise_that_mpi_does_not_keep(environ: dict[str, str], texts: list[str]) -> None:
    from hvdlite.comm.mpi.job import check_world_size

    with pytest.raises(hvd.WorldSizeError) as caught:
        check_world_size(1, environ, "Some MPI 1.0")
    for text in [*texts, "Some MPI 1.0", "each would train alone"]:
        assert text in str(caught.value)
    check_world_size(int(next(iter(environ.values()))), environ, "Some MPI 1.0")


def test_mpich_needs_another_kind_of_srun() -> None:
    from hvdlite.comm.mpi.job import check_world_size

    with pytest.raises(hvd.WorldSizeError, match="srun --mpi=pmi2 "):
        check_world_size(1, {"SLURM_STEP_NUM_TASKS": "3"}, "MPICH Version: 5.0.2")


@pytest.mark.parametrize("environ", [{}, {"OMPI_COMM_WORLD_SIZE": "1"}, {"WORLD_SIZE": "8"}, {"SLURM_NTASKS": "3"}])
def test_one_process_that_was_promised_no_more(environ: dict[str, str]) -> None:
    from hvdlite.comm.mpi.job import check_world_size

    check_world_size(1, environ, "Some MPI 1.0")


def test_init_raises_where_the_launcher_is_not_mpi() -> None:
    environ = {**os.environ, "WORLD_SIZE": "2", "RANK": "0"}
    code = "import hvdlite; hvdlite.init()"
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "WorldSizeError: WORLD_SIZE=2: torchrun started 2 processes" in done.stderr


def test_settings_come_from_either_prefix() -> None:
    environ = {
        "HVDLITE_BUCKET_BYTES": "1024",
        "HOROVOD_FUSION_THRESHOLD": "5",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "7",
        "HVDLITE_STALL_CHECK_TIME_SECONDS": "3.5",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HVDLITE_UNKNOWN": "x",
    }
    config = Config.from_env(environ)
    assert config == Config(
        bucket_bytes=1024, fusion_threshold=5, stall_check_time_seconds=3.5, stall_check_disable=True
    )
    for variable, text in (("HVDLITE_BUCKET_BYTES", "much"), ("HOROVOD_STALL_CHECK_DISABLE", "perhaps")):
        with pytest.raises(ArgumentError, match=f"{variable}='{text}': expected"):
            Config.from_env({variable: text})


def test_a_setting_that_is_gone_says_what_to_do() -> None:
    with pytest.raises(ArgumentError, match=r"HVDLITE_MPI_GPU=1: .*Take this variable away: .*HVDLITE_NCCL=0"):
        Config.from_env({"HVDLITE_MPI_GPU": "1"})
    assert Config.from_env({"HVDLITE_MPI_GPU": "0"}) == Config.from_env({"HVDLITE_MPI_GPU": ""}) == Config()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_topology(hosts: list[int]) -> None:
    places = [Topology.of(rank, hosts) for rank in range(len(hosts))]
    # Local rank and host name every rank; so do local rank and cross rank.
    assert len({(hosts[p.rank], p.local_rank) for p in places}) == len(hosts)
    assert len({(p.cross_rank, p.local_rank) for p in places}) == len(hosts)
    for place in places:
        assert place.local_size == hosts.count(hosts[place.rank])
        assert 0 <= place.local_rank < place.local_size
        assert 0 <= place.cross_rank < place.cross_size == sum(p.local_rank == place.local_rank for p in places)
        assert place.is_homogeneous == (len({hosts.count(host) for host in hosts}) == 1)


def test_ranks_as_threads_have_hosts() -> None:
    def place() -> tuple[int, ...]:
        return hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()

    assert on_ranks(3, place, hosts=[0, 1, 0]) == [(0, 0, 2, 0, 2), (1, 0, 1, 1, 2), (2, 1, 2, 0, 1)]
    assert on_ranks(2, hvd.is_homogeneous) == [True, True]


def test_the_job_in_words() -> None:
    assert on_ranks(1, hvd.describe) == ["1 rank on 1 host (one process, without MPI)"]
    assert on_ranks(3, hvd.describe, hosts=[0, 0, 7]) == ["3 ranks on 2 hosts (one process, without MPI)"] * 3


def test_a_rank_that_fails_takes_the_threads_down() -> None:
    def fail_on_one() -> None:
        if hvd.rank() == 1:
            raise ZeroDivisionError("rank 1's own mistake")
        hvd.barrier()

    with pytest.raises(ZeroDivisionError, match="own mistake"):
        on_ranks(3, fail_on_one, timeout=20)


def test_a_rank_that_leaves_early_is_named() -> None:
    def leave_on_one() -> None:
        if hvd.rank() == 1:
            return
        hvd.allreduce(np.ones(3), name="needs all")

    with pytest.raises(HvdliteError, match=r"rank 1 has left the job, and this rank still waits for 'needs all'"):
        on_ranks(2, leave_on_one, timeout=20)


def test_a_rank_that_leaves_without_joining_is_named() -> None:
    def leave_on_one() -> None:
        hvd.barrier()
        if hvd.rank() != 1:
            hvd.join()

    with pytest.raises(HvdliteError, match=r"rank 1 has left the job, and this rank still waits for join\(\)\."):
        on_ranks(3, leave_on_one, timeout=20)


def test_arrays_that_jax_traces_are_explained() -> None:
    """A stand-in for JAX's own class, which is known by its name: JAX is not installed for the tests."""
    tracer = type(
        "JitTracer", (type("Tracer", (), {"__module__": "jax._src.core"}),), {"__module__": "jax._src.interpreters"}
    )
    with pytest.raises(UnsupportedTensorError, match=r"JAX is tracing the function.*hvdlite docs jax"):
        on_ranks(1, hvd.allreduce, tracer())


@pytest.mark.parametrize("n", [2, 3, 12])
def test_operations_that_nobody_waits_for_do_not_keep_a_rank_at_the_end(n: int) -> None:
    def leave(operations: int) -> None:
        for number in range(operations):
            hvd.allgather_async(np.ones(1 + 3000 * (number % 3)), name=f"nobody waits for {number}")

    for operations in (1, 4, 13, 40):
        on_ranks(n, leave, operations, timeout=30)
