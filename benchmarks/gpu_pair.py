"""Measures two ranks on one GPU. The exchange is real but slow, because NCCL uses sockets between ranks of one GPU."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import hvdlite_torch as hvd
from benchmarks.checks import WrongResult
from benchmarks.figures import in_turn
from benchmarks.gpu import DDP, NOTHING, TRACED, Training, gpt, record_trace, wait
from tests.gpu.card import take_card

ROUNDS = 4
SIZES = (2**20, 25 * 2**20, 2**28)


def measure(tiny: bool, trace: str | None = None) -> dict[str, Any]:
    """Measure on each of two ranks.

    Args:
        tiny: Whether to train a small model.
        trace: A file (.json.gz) for a profiler's trace of some steps of rank 0; None for no trace.

    Returns:
        ``steps``: seconds of a training step without an exchange, with DDP's, with hvdlite's; ``allreduce``: bytes per second
        by size; ``trace``: the result of `record_trace` on rank 0, or None.
    """
    device = take_card(hvd.rank())
    task = gpt(tiny)
    torch.manual_seed(0)
    initial = task.model()
    inputs, labels = task.batch(torch.Generator().manual_seed(hvd.rank()))
    batch = inputs.to(device), labels.to(device)
    if not torch.distributed.is_initialized():
        store = torch.distributed.FileStore(hvd.broadcast_object(tempfile.mktemp(prefix="gpu_pair")), hvd.size())  # type: ignore[attr-defined]  # torch does not say that it exports this
        torch.distributed.init_process_group("nccl", store=store, rank=hvd.rank(), world_size=hvd.size())
    trainings = {variant: Training(variant, initial, device) for variant in (NOTHING, DDP, "hvdlite")}
    times: dict[str, list[float]] = {variant: [] for variant in trainings}
    for turn in range(4 + ROUNDS):
        for variant in in_turn(list(trainings), turn):
            hvd.barrier()
            begin = time.perf_counter()
            trainings[variant].step(batch)
            wait(device)
            if turn >= 4:  # hvdlite sends nothing early before its third step
                times[variant].append(time.perf_counter() - begin)
    for variant in (DDP, "hvdlite"):
        hvd.assert_in_sync(trainings[variant].model)
    found = None
    if trace is not None and hvd.rank() == 0:
        found = record_trace(trainings["hvdlite"], batch, Path(trace))
    elif trace is not None:
        for _ in range(1 + TRACED):
            trainings["hvdlite"].step(batch)
    steps = [
        {"variant": variant, "median": statistics.median(each), "minimum": min(each)} for variant, each in times.items()
    ]
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
