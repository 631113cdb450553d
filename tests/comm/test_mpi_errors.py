"""What MPI reports is raised as an error of ours, which a program can catch."""

from __future__ import annotations

import numpy as np
import pytest

from hvdlite.comm.mpi.start import _for_the_load, start_mpi
from hvdlite.errors import CommunicationError
from tests.support.jobs import PROGRAMS, Start


def test_an_error_of_mpi_is_a_communication_error() -> None:
    start_mpi()  # which leaves no file in /dev/shm; the following imports would
    from mpi4py import MPI

    from hvdlite.comm.mpi.collectives import MpiCollectives
    from hvdlite.comm.mpi.transport import MpiTransport

    transport = MpiTransport(MPI.COMM_SELF)
    collectives = MpiCollectives(transport)
    numbers = np.ones(3)
    for fail, words in (
        (lambda: transport.send(numbers, 7), "send: .*invalid rank"),
        (lambda: transport.post(b"x", 7), "post: .*invalid rank"),
        (lambda: collectives.broadcast(numbers, 7), "broadcast: .*(root|rank)"),
    ):
        with pytest.raises(CommunicationError, match=f"(?i)MPI failed in {words}.*cannot go on") as raised:
            fail()
        assert isinstance(raised.value.__cause__, MPI.Exception)


def test_a_program_catches_what_mpi_reports_in_an_operation(start: Start) -> None:
    """Rank 1's MPI fails in the middle of an operation. Both ranks are told, and neither waits."""
    ended = start("-np", "2", "--no-tag-output", "python", str(PROGRAMS / "mpi_fails.py")).end()
    assert ended.code == 0, ended.err
    assert "rank 1: CommunicationError: MPI failed in " in ended.out
    assert "MPI_ERR_OTHER" in ended.out
    assert "rank 0: " in ended.out
    assert "rank 1" in ended.out.partition("rank 0: ")[2]


@pytest.mark.parametrize(
    ("offered", "asked"),
    [("munge,native", {"PMIX_SECURITY_MODE": "native"}), ("native", {}), ("munge", {}), ("native,munge", {})],
)
def test_of_what_srun_offers_the_wheel_asks_for_what_it_has(offered: str, asked: dict[str, str]) -> None:
    assert _for_the_load({"PMIX_RANK": "0", "PMIX_SECURITY_MODE": offered}) == asked


def test_srun_without_pmix_leaves_no_file() -> None:
    """Open MPI would be alone in each task, and would leave a file of 16 MiB in /dev/shm if it made one."""
    for environ in ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, {}):
        assert _for_the_load(environ) == {"OMPI_MCA_btl": "^sm,ofi"}
