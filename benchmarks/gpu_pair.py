"""Measures two ranks on one GPU. The exchange is real but slow, because NCCL uses sockets between ranks of one GPU."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import hvdlite_torch as hvd
from benchmarks.checks import WrongResult
from benchmarks.gpu import NOTHING, TRACED, Training, gpt, record_trace, wait

ROUNDS = 3
SIZES = (2**20, 25 * 2**20, 2**28)


def measure(tiny: bool, trace: str | None = None) -> dict[str, Any]:
    """Measure on each of two ranks.

    Args:
        tiny: Whether to train a small model.
        trace: A file (.json.gz) for a profiler's trace of some steps of rank 0; None for no trace.

    Returns:
        ``steps``: seconds of a training step with and without exchange; ``allreduce``: bytes per second by size; ``trace``:
        the result of `record_trace` on rank 0, or None.
    """
    # NCCL refuses two ranks on one GPU unless NCCL_HOSTID differs (up to 2.29) or NCCL_MULTI_RANK_GPU_ENABLE is set (2.30).
    os.environ.update(NCCL_HOSTID=f"rank{hvd.rank()}", NCCL_MULTI_RANK_GPU_ENABLE="1")
    os.environ.update(NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    task = gpt(tiny)
    torch.manual_seed(0)
    initial = task.model()
    inputs, labels = task.batch(torch.Generator().manual_seed(hvd.rank()))
    batch = inputs.to(device), labels.to(device)
    steps, found = [], None
    for variant in (NOTHING, "hvdlite"):
        training = Training(variant, initial, device)
        times = []
        for number in range(3 + ROUNDS):
            hvd.barrier()
            begin = time.perf_counter()
            training.step(batch)
            wait(device)
            if number >= 3:
                times.append(time.perf_counter() - begin)
        if variant != NOTHING:
            hvd.assert_in_sync(training.model)
            if trace is not None and hvd.rank() == 0:
                found = record_trace(training, batch, Path(trace))
            elif trace is not None:
                for _ in range(1 + TRACED):
                    training.step(batch)
        steps.append({"variant": variant, "median": statistics.median(times), "minimum": min(times)})
        del training
    speeds = [_allreduce(size, device) for size in SIZES[: 1 if tiny else None]]
    return {"steps": steps, "allreduce": speeds, "trace": found}


def _allreduce(size: int, device: torch.device) -> dict[str, float]:
    tensor = torch.full((size // 4,), 1.0, device=device)
    times = []
    for _ in range(1 + ROUNDS):
        hvd.barrier()
        begin = time.perf_counter()
        result = hvd.allreduce(tensor, op=hvd.Sum)
        wait(device)
        times.append(time.perf_counter() - begin)
    if not bool((result == hvd.size()).all()):
        raise WrongResult(f"allreduce of {size} bytes: not {hvd.size()} everywhere.")
    return {"bytes": size, "bytes_per_second": size / min(times[1:])}
