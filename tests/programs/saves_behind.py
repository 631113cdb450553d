"""Saves checkpoints behind the training, one after the other, until it is killed: ``saves_behind.py FOLDER [RANKS]``.

Rank 0 prints which are saved for certain. With RANKS, the ranks are threads of this process; else it is a job's rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hvdlite as hvd
from hvdlite.testing import on_ranks
from tests.support import counted_state

FOLDER = Path(sys.argv[1])


def work() -> None:
    found = hvd.checkpoint.load(FOLDER)
    step = found["step"] if found else 0
    while True:
        step += 1
        counted_state.save(FOLDER, step, 200_000, keep=2, wait=False)
        if hvd.rank() == 0:
            print("saved", step - 1, flush=True)


counted_state.register()
if len(sys.argv) > 2:
    on_ranks(int(sys.argv[2]), work)
else:
    hvd.init()
    print(f"rank {hvd.rank()} is {os.getpid()}", flush=True)
    work()
