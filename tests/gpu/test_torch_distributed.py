"""A process group of the backend "hvdlite" with tensors on a real GPU, which go to torch's NCCL: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import hvdlite_torch as hvd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
    pytest.mark.filterwarnings("default"),
]


def test_both_kinds_of_memory_in_one_group() -> None:
    hvd.init()
    dist.init_process_group("cpu:hvdlite,cuda:nccl")
    try:
        for device in ("cpu", "cuda"):
            tensor = torch.arange(5.0, device=device)
            dist.all_reduce(tensor)
            gathered = torch.empty(5, device=device)
            dist.all_gather_into_tensor(gathered, tensor)
            assert gathered.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).cuda())
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    finally:
        dist.destroy_process_group()
        hvd.shutdown()
