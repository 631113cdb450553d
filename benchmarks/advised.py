"""Trains the text GPT of `examples/torch_gpt_text.py` with one strategy, for `benchmarks.advise`, and counts time and bytes.

There are two hosts with one rank each. Rank 0 prints a line of JSON: the seconds of a step, and the bytes that a rank sends in
it, as the mean of both ranks: the kernel says what its connections have carried, without the headers of TCP.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

import hvdlite_torch as hvd
from examples.torch_gpt_text import GPT, load, summed_loss
from hvdlite.async_sgd.training.options import Servers
from hvdlite.tools.advise import TrainingStrategy, parse_strategy

BATCH, CONTEXT, LAYERS, WIDTH = 8, 64, 4, 128
"""The windows of a rank, and the sizes of the model: those that `examples/torch_gpt_text.py` has on two ranks."""


def wrap(strategy: TrainingStrategy, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Any:
    """Return the optimizer of a strategy."""
    number, named = strategy.number, model.named_parameters()
    if strategy.kind in ("sync", "async"):
        servers: Servers = int(number) or "sharded"
        return hvd.AsyncDistributedOptimizer(optimizer, model, mode=strategy.kind, servers=servers, overlap=False)
    options: dict[str, Callable[[], dict[str, Any]]] = {
        "gradients": lambda: {"overlap": False},
        "sharded": lambda: {"shard": True},
        "overlapped": lambda: {"overlap": True},
        "fp16": lambda: {"compression": hvd.Compression.fp16},
        "powersgd": lambda: {"compression": hvd.Compression.powersgd(int(number))},
        "topk": lambda: {"compression": hvd.Compression.topk(number)},
        "localsgd": lambda: {"local_steps": hvd.LocalSGD(int(number))},
        "diloco": lambda: {"local_steps": hvd.DiLoCo(int(number))},
    }
    return hvd.DistributedOptimizer(optimizer, named, **options[strategy.kind]())


def travelled() -> int:
    """Return how many bytes this host has sent and received by TCP."""
    sockets = subprocess.run(["ss", "-tinH"], capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"bytes_(?:acked|received):(\d+)", sockets)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategy", type=parse_strategy)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--warm-up", type=int, default=6)
    options = parser.parse_args()
    hvd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    text, _ = load()
    model = GPT(LAYERS, WIDTH, CONTEXT)
    hvd.broadcast_parameters(model.state_dict())
    optimizer = wrap(options.strategy, torch.optim.AdamW(model.parameters(), lr=1e-3), model)
    draw, window = torch.Generator().manual_seed(hvd.rank()), torch.arange(CONTEXT + 1)

    def train(steps: int) -> None:
        for _ in range(steps):
            starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=draw)
            optimizer.zero_grad()
            (summed_loss(model, text[starts[:, None] + window]) / (BATCH * CONTEXT)).backward()
            optimizer.step()

    if getattr(optimizer, "is_server", False):
        optimizer.serve()
        seconds, nbytes = None, 0
    else:
        train(options.warm_up)
        before, begin = travelled(), time.perf_counter()
        train(options.steps)
        seconds, nbytes = (time.perf_counter() - begin) / options.steps, travelled() - before
        if hasattr(optimizer, "finish"):
            optimizer.finish()
    everybody: list[float | None] = hvd.allgather_object(seconds)
    if hvd.rank() == 0:
        times = [each for each in everybody if each is not None]
        print(json.dumps({"seconds": sum(times) / len(times), "bytes": nbytes / 2 / options.steps}), flush=True)


if __name__ == "__main__":
    main()
