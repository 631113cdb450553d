"""Several ranks on one GPU run operations on GPU tensors, and compare the results with NumPy. Each rank prints "all right".

mpirun -n 2 python gpu_operations.py nccl|staged
"""

import os
import sys

import numpy as np
import pytest
import torch

import hvdlite
import hvdlite_torch as hvd

hvdlite.init()
rank, size, way = hvd.rank(), hvd.size(), sys.argv[1]
# NCCL refuses two ranks on one GPU unless NCCL_HOSTID differs (up to 2.29) or NCCL_MULTI_RANK_GPU_ENABLE is set (2.30).
os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo")
os.environ.update(NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
torch.cuda.set_device(0)
gpu = torch.device("cuda", 0)

FUNCTIONS = {hvd.Sum: sum, hvd.Product: lambda each: np.prod(each, axis=0), hvd.Min: min, hvd.Max: max}
DTYPES = ["uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64"]


def values_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).cpu().numpy()


def late(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose values the current stream writes after some time. A reader that does not wait reads zeros."""
    copy = torch.zeros_like(tensor)
    torch.cuda._sleep(20_000_000)
    return copy.copy_(tensor)


for name in DTYPES:
    dtype = getattr(torch, name)
    each = [np.full(5, r + 1) for r in range(size)]
    x = late(torch.from_numpy(each[rank]).to(gpu, dtype))
    for op, function in FUNCTIONS.items():
        if dtype.is_complex and op in (hvd.Min, hvd.Max):
            continue
        expected = function(each) if op in (hvd.Sum, hvd.Product) else np.full(5, function(range(1, size + 1)))
        result = hvd.allreduce(x, op=op)
        assert result.device == gpu and result.dtype is dtype
        np.testing.assert_array_equal(values_of(result), expected, f"{op} of {name}")
    mean = hvd.allreduce(x)
    expected = (size + 1) / 2 if dtype.is_floating_point or dtype.is_complex else (size + 1) // 2
    np.testing.assert_allclose(values_of(mean), np.full(5, expected), 1e-2)
    gathered = hvd.allgather(late(torch.full((rank + 1, 2), rank + 1, device=gpu).to(dtype)))
    assert values_of(gathered)[:, 0].real.tolist() == [r + 1 for r in range(size) for _ in range(r + 1)]
    assert (values_of(hvd.broadcast(x, size - 1)) == size).all()
    rows, received = hvd.alltoall(x, torch.tensor([5] + [0] * (size - 1), device=gpu))
    assert received.cpu().tolist() == ([5] * size if rank == 0 else [0] * size)
    assert len(rows) == (5 * size if rank == 0 else 0)
    share = hvd.reducescatter(late(torch.ones(size + 1, 2, device=gpu).to(dtype)), op=hvd.Sum)
    assert (values_of(share) == size).all() and len(share) == (2 if rank == 0 else 1)

# In place, on the caller's own stream; then many operations at once, in different orders
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    y = late(torch.full((1000,), float(rank), device=gpu))
    hvd.allreduce_(y, op=hvd.Sum)
    assert (y.cpu() == sum(range(size))).all()
many = {n: torch.full((100,), float(n + rank), device=gpu) for n in range(10)}
handles = {n: hvd.allreduce_async(many[n], op=hvd.Sum, name=f"n{n}") for n in sorted(many, reverse=bool(rank))}
for n, handle in handles.items():
    assert (hvd.synchronize(handle).cpu() == n * size + sum(range(size))).all()

# Memory that is freed while an operation uses it is not reused before the operation is done
for step in range(20):
    hvd.allreduce_async(torch.full((100_000,), float(step), device=gpu), name=f"lost {step}").wait()
    big = torch.full((100_000,), float(step + rank), device=gpu)
    handle = hvd.allreduce_async(big, op=hvd.Sum, name="freed")
    del big
    noise = torch.full((100_000,), -1.0, device=gpu)
    assert (hvd.synchronize(handle).cpu() == step * size + sum(range(size))).all()
    del noise

if way == "nccl":  # torch raises an error if the host waits for the GPU
    z = torch.ones(1000, device=gpu)
    hvd.allreduce(z)
    torch.cuda.set_sync_debug_mode("error")
    hvd.allreduce(z)
    hvd.allgather(z)
    torch.cuda.set_sync_debug_mode("default")

# Host memory in the same job, and in a call that uses GPU memory on rank 0
assert (hvd.allreduce(torch.ones(3), op=hvd.Sum) == size).all()
with pytest.raises(hvd.MismatchError, match="device=cuda"):
    hvd.allreduce(torch.ones(3, device="cpu" if rank else gpu), op=hvd.Sum)
last = size - 1
if rank != last:
    assert (hvd.allreduce(torch.ones(3, device=gpu), op=hvd.Sum).cpu() == size - 1).all()
assert 0 <= hvd.join() < size
print("all right", flush=True)
