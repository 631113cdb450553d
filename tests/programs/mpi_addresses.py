"""`MpiDeviceCollectives` on host memory, against NumPy: what MPI is given are addresses and types, of whatever memory."""

import numpy as np
import torch

import hvdlite
import hvdlite_torch as hvd
from hvdlite.gpu import setup
from hvdlite.gpu.mpi import MpiDeviceCollectives
from tests.fake_device import fake_gpu

hvdlite.init()
setup.why_no_device_mpi = lambda host: ""  # as if the library had CUDA
rank, size = hvdlite.rank(), hvdlite.size()
total = sum(range(size))
with fake_gpu(None) as gpu:
    channel = hvdlite.api.world().group().device_collectives(gpu)
    assert type(channel) is MpiDeviceCollectives
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.complex64):
        x = gpu.ready(torch.full((5,), rank).to(dtype))
        result = hvd.allreduce(x, op=hvd.Sum)
        np.testing.assert_array_equal(result.to(torch.complex128).numpy(), [total] * 5)
        mean = hvd.allreduce(x, op=hvd.Average)
        expected = total // size if not (dtype.is_floating_point or dtype.is_complex) else total / size
        np.testing.assert_allclose(mean.to(torch.complex128).numpy(), [expected] * 5, 1e-2)
        gathered = hvd.allgather(gpu.ready(torch.full((rank + 1,), rank).to(dtype)))
        assert gathered.real.to(torch.float64).tolist() == [r for r in range(size) for _ in range(r + 1)]
        assert (hvd.broadcast(x, size - 1) == size - 1).all()
        rows, _ = hvd.alltoall(x[: size - rank].contiguous(), [1] * (size - rank) + [0] * rank)
        assert rows.real.to(torch.float64).tolist() == list(range(size - rank))
        share = hvd.reducescatter(gpu.ready(torch.ones(size + 1).to(dtype)), op=hvd.Sum)
        assert (share == size).all() and len(share) == (2 if rank == 0 else 1)
        gpu.use(result, mean, gathered, rows, share)
    gpu.check_kept()
print("all right", flush=True)
