"""A program that forgot the one line: its ranks have trained, and have told each other nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from hvdlite.world import World

# The last is also how broadcast_parameters compares names.
_SHARES_NO_GRADIENTS = {"broadcast", "broadcast_object", "barrier", "allgather_object"}


def look(world: World) -> None:
    """Say so at the end of the program, on rank 0, where optimizers were made and no gradients can have been shared.

    A program whose ranks exchange anything but broadcasts and objects is taken to know what it does.
    """
    here = world.topology
    shares = any(group.exchanges for group in world.groups) or world.kinds - _SHARES_NO_GRADIENTS
    if here.rank or here.size == 1 or not world.config.advice or shares:
        return
    names = sorted({cls.__name__ for cls in _subclasses(torch.optim.Optimizer) if _was_made(cls)})
    if names:
        print(
            f"hvdlite: each of the {here.size} ranks has trained alone: no gradient was exchanged. Wrap the "
            f"optimizer (it was torch.optim's {', '.join(names)}): optimizer = hvd.DistributedOptimizer(optimizer). "
            "HVDLITE_ADVICE=0 if this is as it should be.",
            file=sys.stderr,
            flush=True,
        )


def _subclasses(cls: type) -> Iterator[type]:
    below: type
    for below in type.__subclasses__(cls):
        yield below
        yield from _subclasses(below)


def _was_made(cls: type) -> bool:
    # torch marks the step of a class when its first optimizer is made.
    return bool(getattr(cls.__dict__.get("step"), "hooked", None))
