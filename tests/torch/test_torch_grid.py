"""Grids of data, pipeline and tensor parallelism equal training in one process, on 4 and on 8 processes."""

from __future__ import annotations

import re

import pytest

from tests.support.jobs import PROGRAMS, mpirun

GRIDS = {
    4: [
        *(
            "dp=2,pp=2",
            "dp=2,pp=2,shard",
            "dp=2,pp=2,clip",
            "dp=2,tp=2",
            "dp=2,tp=2,clip",
            "dp=2,tp=2,shard",
            "dp=2,tp=2,shard,clip",
        ),
        *("dp=2,tp=2,fsdp", "pp=2,tp=2", "pp=2,tp=2,clip"),
    ],
    8: ["dp=2,pp=2,tp=2", "dp=2,pp=2,tp=2,shard,clip"],
}


LIMIT = 180.0  # eight processes that import torch and train take 20 s on two quiet cores, and far more on busy ones


@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize(
    ("size", "grids"),
    [
        pytest.param(4, GRIDS[4], id="4", marks=pytest.mark.slow),
        pytest.param(8, GRIDS[8], id="8", marks=pytest.mark.weekly),
    ],
)
def test_a_grid_trains_as_one_process_does(size: int, grids: list[str]) -> None:
    program = str(PROGRAMS / "torch_grid.py")
    done = mpirun(size, program, *grids, timeout=LIMIT, HVDLITE_ADVICE="0", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    distances = re.findall(r"^distance (\S+)$", done.stdout, re.MULTILINE)
    assert len(distances) == done.stdout.count("replicas equal") == size * len(grids), done.stdout
    assert max(map(float, distances)) <= 1e-12
