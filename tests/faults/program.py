"""A small training on three ranks. Rank FAULT_RANK causes the fault FAULT at the stage FAULT_STAGE, in the step FAULT_STEP.

Each rank writes the number of its last step to FAULT_FOLDER/step.RANK. The job finishes when FAULT_FOLDER/finish exists.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAULT = os.environ["FAULT"]
STAGE = os.environ["FAULT_STAGE"]
STEP = int(os.environ["FAULT_STEP"])
FOLDER = Path(os.environ["FAULT_FOLDER"])
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
STRUCK = int(os.environ["FAULT_RANK"]) == RANK
PAUSE = 0.005  # seconds of sleep in each step, so that the ranks do not exchange all the time
OUTLIVES = 60


class Leave(Exception):
    """The training loop ends early."""


def leave_child(own_session: bool) -> None:
    if os.fork() == 0:
        if own_session:
            os.setsid()
        time.sleep(OUTLIVES)
        os._exit(0)


def fork(ends: Callable[[], Any]) -> None:
    if os.fork() == 0:
        ends()
    else:
        os.wait()


def recurse() -> None:
    recurse()


def fail(kind: str) -> None:
    raise ValueError("in a forked child" if kind == "fork_raises" else f"the reason of rank {RANK}")


def strike() -> None:
    """Cause the fault. Return only if the job must go on."""
    kind = FAULT.removeprefix("hosts_")
    if kind.startswith("leaves_"):
        if kind == "leaves_program":
            subprocess.Popen(["sleep", str(OUTLIVES)])
        else:
            leave_child(own_session=kind == "leaves_session")
        kind = "kill_itself"
    (FOLDER / "struck").write_text(str(time.time()))
    match kind:
        case "exit0":
            os._exit(0)
        case "exit7":
            os._exit(7)
        case "sysexit0":
            sys.exit(0)
        case "return":
            raise Leave
        case "sysexit3":
            sys.exit(3)
        case "exception":
            fail(kind)
        case "memory":
            raise MemoryError("no 99 GiB")
        case "recursion":
            recurse()
        case "interrupt":
            raise KeyboardInterrupt
        case "segfault":
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "kill_itself":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sleeps":
            time.sleep(10_000)
        case "thread_dies":
            thread = threading.Thread(target=lambda: fail(kind))
            thread.start()
            thread.join()
            time.sleep(10_000)
        case "keeps_gil":
            ctypes.PyDLL(None).sleep(10_000)
        case "mpi_abort":
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(9)
        case "fork_exits":
            fork(lambda: sys.exit(0))
        case "fork_raises":
            fork(lambda: fail(kind))
        case "many_words":
            sys.stdout.write("many words\n" * 500_000)
            raise ValueError("after many words")
        case _:
            raise SystemExit(f"no such fault: {FAULT}")


def strike_at(stage: str, step: int = STEP) -> None:
    if STRUCK and stage == STAGE and step == STEP:
        strike()


def train(exchange: Callable[[], Callable[[], None]], must_finish: Callable[[bool], bool]) -> None:
    """Make steps until the job must finish. ``exchange`` starts the exchange of a step, and returns a function that waits."""
    for step in range(1_000_000):
        strike_at("step", step)
        wait = exchange()
        strike_at("exchange", step)
        wait()
        (FOLDER / f"step.{RANK}.new").write_text(str(step))
        os.replace(FOLDER / f"step.{RANK}.new", FOLDER / f"step.{RANK}")
        if step % 5 == 0 and must_finish((FOLDER / "finish").exists()):
            return
        time.sleep(PAUSE)


def train_arrays() -> None:
    import numpy as np

    import hvdlite as hvd

    hvd.init()
    strike_at("init")
    gradients = [np.ones(shape, np.float32) for shape in ((64, 128), (128,), (300_000,))]

    def exchange() -> Callable[[], None]:
        handles = [hvd.allreduce_async(array, hvd.Average, f"gradient {n}") for n, array in enumerate(gradients)]
        return lambda: [handle.wait() for handle in handles] and None

    def must_finish(seen: bool) -> bool:
        return bool(hvd.allreduce(np.array([seen], np.int32), hvd.Max, "finish")[0])

    train(exchange, must_finish)


def train_torch() -> None:
    import torch

    import hvdlite_torch as hvd

    hvd.init()
    strike_at("init")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    hvd.broadcast_parameters(model.state_dict(), 0)
    plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, shard="shard" in os.environ["FAULT_TRAINING"])
    data = torch.utils.data.TensorDataset(torch.randn(4000, 64), torch.randint(0, 10, (4000,)))
    workers = 2 if "loader" in os.environ["FAULT_TRAINING"] else 0

    def endless() -> Any:
        while True:
            yield from torch.utils.data.DataLoader(data, batch_size=16, num_workers=workers)

    batches = endless()

    def exchange() -> Callable[[], None]:
        x, y = next(batches)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        return lambda: optimizer.step()

    def must_finish(seen: bool) -> bool:
        return bool(hvd.allreduce(torch.tensor([int(seen)]), op=hvd.Max, name="finish")[0])

    train(exchange, must_finish)


if __name__ == "__main__":
    strike_at("start")
    try:
        if "torch" in os.environ["FAULT_TRAINING"]:
            train_torch()
        else:
            train_arrays()
    except Leave:
        sys.exit(0)
    print(f"rank {RANK} done", flush=True)
