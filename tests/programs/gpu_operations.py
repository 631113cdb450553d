"""Several ranks on one GPU run operations on GPU tensors, and compare the results with NumPy. Each rank prints "all right".

mpirun -n 2 python gpu_operations.py nccl|staged
"""

import sys

import numpy as np
import pytest
import torch

import hvdlite
import hvdlite_torch as hvd
from hvdlite_torch.tensors.device import FLOAT8
from tests.gpu.card import host_may_not_wait, late, own_stream, take_card

hvdlite.init()
rank, size, way = hvd.rank(), hvd.size(), sys.argv[1]
gpu = take_card(rank)

FUNCTIONS = {hvd.Sum: np.add, hvd.Product: np.multiply, hvd.Min: np.minimum, hvd.Max: np.maximum}
DTYPES = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
DTYPES += ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]


def values_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).cpu().numpy()


for name in DTYPES:
    dtype = getattr(torch, name)
    each = [np.full(5, r + 1) for r in range(size)]
    x = late(torch.from_numpy(each[rank]).to(gpu, dtype))
    for op, function in FUNCTIONS.items():
        if dtype.is_complex and op in (hvd.Min, hvd.Max):
            continue
        expected = function.reduce(each)
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

# Truth values
true_here = torch.tensor([True, rank == 0, False], device=gpu)
assert hvd.allreduce(late(true_here), op=hvd.Min).tolist() == [True, size == 1, False]
assert hvd.allreduce(late(true_here), op=hvd.Max).tolist() == [True, True, False]

# Floating-point numbers of 8 bits, whose sums NCCL makes on a GPU since Hopper. Small whole numbers are exact in both.
for dtype in FLOAT8 if way == "nccl" else ():
    x = late(torch.arange(8, device=gpu).float()).to(dtype)
    result = hvd.allreduce(x, op=hvd.Sum)
    assert result.dtype is dtype and result.float().tolist() == [float(size * n) for n in range(8)], f"sum of {dtype}"
    mean = hvd.allreduce(x)
    assert mean.float().tolist() == [float(n) for n in range(8)], f"mean of {dtype}"

# Gradients of operations: torch's backward pass runs them in a thread of its own
y = torch.full((4,), float(rank), device=gpu, requires_grad=True)
(hvd.allreduce(y, op=hvd.Sum) * (rank + 1)).sum().backward()
assert y.grad is not None and y.grad.tolist() == [float(sum(range(1, size + 1)))] * 4

# In place, on the caller's own stream; then many operations at once, in different orders
with own_stream():
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
    with host_may_not_wait():
        hvd.allreduce(z)
        hvd.allgather(z)

# Host memory in the same job, and in a call that uses GPU memory on rank 0
host = np.ones(3, np.float32)
assert (hvdlite.allreduce(host, op=hvd.Sum) == size).all()
with pytest.raises(hvd.MismatchError, match="device=cuda"):
    hvdlite.allreduce(host if rank else torch.ones(3, device=gpu), op=hvd.Sum)
last = size - 1
if rank != last:
    assert (hvd.allreduce(torch.ones(3, device=gpu), op=hvd.Sum).cpu() == size - 1).all()
assert 0 <= hvd.join() < size
print("all right", flush=True)
