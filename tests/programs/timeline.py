"""Rank 1 is late for every operation. If the first argument is "killed", rank 1 kills itself at the end, while others wait."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import hvdlite as hvd

how, folder = sys.argv[1], Path(sys.argv[2])


def wait_for(*files: Path) -> None:
    while not all(file.exists() for file in files):
        time.sleep(0.01)


def has_written(rank: int, what: str) -> bool:
    return what in (folder / "trace.json.ranks" / f"rank.{rank}.json").read_text()


hvd.init()
for turn in range(5):
    ready = [folder / f"{turn}.{rank}" for rank in (0, 2)]
    if hvd.rank() == 1:
        wait_for(*ready)  # until the others have submitted their operations
    handle = hvd.allreduce_async(np.ones(1000), name="loss")
    if hvd.rank() != 1:
        ready[hvd.rank() // 2].touch()
    handle.wait()
if how == "killed":
    if hvd.rank() == 1:
        while not all(has_written(rank, "allreduce.never") for rank in (0, 2)) or not has_written(1, "allreduce.loss"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(np.ones(3), name="never")
