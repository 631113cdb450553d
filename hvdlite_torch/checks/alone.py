"""A warning for programs without `DistributedOptimizer`, whose ranks have trained without communicating."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hvdlite.ranks.log import tell
from hvdlite.runtime.world import World

# broadcast_parameters uses the last one, to compare names.
_SHARES_NO_GRADIENTS = {"broadcast", "broadcast_object", "barrier", "allgather_object"}


def look(world: World) -> None:
    """Warn on rank 0, at the end of the program, if it made optimizers and the ranks cannot have shared gradients.

    There is no warning if the ranks used any operation other than broadcasts, barriers and operations on objects.
    """
    here = world.topology
    shares = any(group.exchanges for group in world.groups) or world.kinds - _SHARES_NO_GRADIENTS
    if here.rank or here.size == 1 or not world.config.advice or shares:
        return
    names = sorted({cls.__name__ for cls in _subclasses(torch.optim.Optimizer) if _was_made(cls)})
    if names:
        tell(
            "advice",
            f"hvdlite: each of the {here.size} ranks has trained alone: no gradient was exchanged. Wrap the "
            f"optimizer (it was torch.optim's {', '.join(names)}): optimizer = hvd.DistributedOptimizer(optimizer). "
            "HVDLITE_ADVICE=0 if this is as it should be.",
            here.rank,
        )


def _subclasses(cls: type) -> Iterator[type]:
    below: type
    for below in type.__subclasses__(cls):
        yield below
        yield from _subclasses(below)


def _was_made(cls: type) -> bool:
    # torch marks the step of a class when its first optimizer is made.
    return bool(getattr(cls.__dict__.get("step"), "hooked", None))
