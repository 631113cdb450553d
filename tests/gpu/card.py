"""The GPU of a test or of a program: card 0 of this machine, or `tests.support.fake_device` if ``GPU_STAND_IN=1``.

The stand-in lets the programs for a card run on any machine, so that the few minutes with a card are not spent on their slips.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator

import torch

from tests.support.fake_device import fake_gpu

STAND_IN = os.environ.get("GPU_STAND_IN") == "1"
CARD = torch.device("cpu") if STAND_IN else torch.device("cuda", 0)
NO_CARD = None if STAND_IN or torch.cuda.is_available() else "torch sees no GPU here; GPU_STAND_IN=1 takes the stand-in"


def take_card(rank: int = 0) -> torch.device:
    """Let this process use card 0, or the stand-in, after ``init()``. Several ranks may share the card.

    Args:
        rank: The rank of this process. NCCL refuses two ranks on one GPU unless NCCL_HOSTID differs (up to 2.29) or
            NCCL_MULTI_RANK_GPU_ENABLE is set (2.30); then it must be told to use sockets.
    """
    if STAND_IN:
        held = contextlib.ExitStack()
        held.enter_context(fake_gpu(index=0, visible=1))
        atexit.register(held.pop_all)
        return CARD
    os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_NET="Socket")
    os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    torch.cuda.set_device(CARD)
    return CARD


def late(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose values the current stream writes after some time. A reader that does not wait reads zeros."""
    copy = torch.zeros_like(tensor)
    if not STAND_IN:
        torch.cuda._sleep(20_000_000)
    return copy.copy_(tensor)


@contextlib.contextmanager
def host_may_not_wait() -> Iterator[None]:
    """Let torch raise an error if the host waits for the GPU."""
    if STAND_IN:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def own_stream() -> contextlib.AbstractContextManager[object]:
    """Return a context manager in which the current stream is a new one."""
    return contextlib.nullcontext() if STAND_IN else torch.cuda.stream(torch.cuda.Stream())
