"""Programs with tensors of torch."""

from __future__ import annotations

import torch
from typing_extensions import assert_type

import hvdlite_torch as hvd

Tensors = list[torch.Tensor]


def exchange() -> tuple[int, int]:
    """Operations, and handles of them."""
    x = torch.ones(2 * hvd.size(), 1)
    assert_type(hvd.allreduce(x), torch.Tensor)
    handle = hvd.allreduce_async(x, op=hvd.Sum)
    assert_type(handle, hvd.Handle[torch.Tensor])
    while not hvd.poll(handle):
        pass
    assert_type(hvd.synchronize(handle), torch.Tensor)
    assert_type(hvd.allgather(x), torch.Tensor)
    assert_type(hvd.synchronize(hvd.allgather_async(x)), torch.Tensor)
    assert_type(hvd.broadcast(x, root_rank=0), torch.Tensor)
    assert_type(hvd.synchronize(hvd.broadcast_async(x, 0)), torch.Tensor)
    assert_type(hvd.reducescatter(x, op=hvd.Sum), torch.Tensor)
    assert_type(hvd.synchronize(hvd.reducescatter_async(x)), torch.Tensor)
    assert_type(hvd.alltoall(x), torch.Tensor)
    rows, counts = hvd.alltoall(x, splits=[2] * hvd.size())
    assert_type(counts, torch.Tensor)
    assert_type(hvd.alltoall_async(x, [2] * hvd.size()).wait(), tuple[torch.Tensor, torch.Tensor])
    assert_type(hvd.allgather_object(1), list[int])
    assert_type(hvd.broadcast_object({"epoch": 1}), dict[str, int])
    hvd.barrier()
    assert_type(hvd.join(), int)
    return len(rows), int(counts.sum())


def in_place() -> float:
    """Operations that write into their argument."""
    x = torch.ones(2)
    assert_type(hvd.allreduce_(x, op=hvd.Sum), torch.Tensor)
    assert_type(hvd.synchronize(hvd.allreduce_async_(x)), torch.Tensor)
    assert_type(hvd.broadcast_(x, 0), torch.Tensor)
    assert_type(hvd.synchronize(hvd.broadcast_async_(x, 0)), torch.Tensor)
    return float(x.sum())


def grouped() -> Tensors:
    """Several tensors at once."""
    several = [torch.ones(2 * hvd.size())]
    assert_type(hvd.grouped_allreduce(several), Tensors)
    assert_type(hvd.synchronize(hvd.grouped_allreduce_async(several)), Tensors)
    assert_type(hvd.grouped_allreduce_(several), Tensors)
    assert_type(hvd.synchronize(hvd.grouped_allreduce_async_(several)), Tensors)
    assert_type(hvd.grouped_allgather(several), Tensors)
    assert_type(hvd.synchronize(hvd.grouped_allgather_async(several)), Tensors)
    assert_type(hvd.grouped_reducescatter(several), Tensors)
    assert_type(hvd.synchronize(hvd.grouped_reducescatter_async(several)), Tensors)
    return several


def sparse() -> torch.Tensor:
    """Rows of a gradient."""
    own = torch.sparse_coo_tensor(torch.tensor([[hvd.rank()]]), torch.tensor([1.0]), (3,), check_invariants=True)
    total = hvd.synchronize(hvd.sparse_allreduce_async(own, "rows", hvd.Sum))
    assert isinstance(total, torch.Tensor)
    return total


def built() -> int:
    """What Horovod's programs ask for."""
    assert_type(hvd.mpi_enabled(), bool)
    assert_type(hvd.gloo_enabled(), bool)
    asked = (hvd.mpi_built(), hvd.gloo_built(), hvd.cuda_built(), hvd.rocm_built(), hvd.ccl_built(), hvd.ddl_built())
    assert_type(hvd.nccl_built(), int)
    return sum(asked)
