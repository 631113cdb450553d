"""For tests of torch that need a process for each rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

import hvdlite_torch as hvd
from tests.conftest import UNDER_MPI

processes = pytest.mark.skipif(
    not UNDER_MPI, reason="torch.distributed and torch.export are one for a process, so ranks cannot be threads: mpirun"
)


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """In modules that import it: torch.distributed ends with the module, if its tests have started it."""
    if UNDER_MPI:
        hvd.init()
    yield
    if UNDER_MPI:
        hvd.barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
