"""Accelerate and `transformers.Trainer` over hvdlite: ``hvdlite_torch.accelerate.prepare()`` before the first of them is made.

A program imports this module itself, because it imports Accelerate. Accelerate takes the default group of torch.distributed if
there is one, and reads a few environment variables to learn that there are several ranks. `prepare` makes the group, and sets
the variables.
"""

from __future__ import annotations

import os
import socket

import torch

from hvdlite import api
from hvdlite.checks import require
from hvdlite.errors import ArgumentError

# This check comes first, because the lines below import Accelerate.
require("accelerate", "frameworks", "hvdlite_torch.accelerate")

from accelerate.state import PartialState  # noqa: E402

from hvdlite_torch.distributed import backend  # noqa: E402

__all__ = ["prepare"]


def prepare() -> None:
    """Let ``accelerate.Accelerator()`` and ``transformers.Trainer`` run on the ranks of this job.

    Call this function before the program makes an `Accelerator` or `TrainingArguments`. It joins the job, starts
    torch.distributed with the backend "hvdlite" if the program has not done so, and sets RANK, WORLD_SIZE, LOCAL_RANK and
    LOCAL_WORLD_SIZE; where there is no GPU, ACCELERATE_USE_CPU; on several hosts MASTER_ADDR, without which Accelerate refuses
    to begin.

    Raises:
        ArgumentError: Accelerate has begun without hvdlite, or torch.distributed runs with another backend.
    """
    backend.start_for("hvdlite_torch.accelerate.prepare")
    begun = PartialState._shared_state  # as transformers reads it: a PartialState() would begin
    if begun and begun["num_processes"] != api.size():
        raise ArgumentError(
            f"Accelerate has begun already, with {begun['num_processes']} of {api.size()} ranks: call "
            "hvdlite_torch.accelerate.prepare() before the program makes an Accelerator or TrainingArguments."
        )
    numbers = {"RANK": api.rank(), "WORLD_SIZE": api.size()}
    numbers |= {"LOCAL_RANK": api.local_rank(), "LOCAL_WORLD_SIZE": api.local_size()}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    if not torch.cuda.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"
    if api.local_size() != api.size():
        address: str = api.broadcast_object(socket.gethostname(), 0)
        os.environ.setdefault("MASTER_ADDR", address)
