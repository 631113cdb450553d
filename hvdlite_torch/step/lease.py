"""`Lease`: shared memory, channels, a thread, and hooks on parameters, which can outlive a distributed optimizer.

A program drops an optimizer at any time, and Python may notice that later on one rank than on another. Releasing memory and
channels needs all ranks. So a lease is kept until all ranks meet to make another optimizer, and all have dropped this one
(`hvdlite.runtime.group.Group.release_dropped`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from hvdlite.errors import HvdliteError
from hvdlite.gradients.overlap import Overlap
from hvdlite.gradients.reducer import Reducer


class Lease:
    """The resources that one optimizer holds on one rank: memory, channels, a thread, and hooks.

    Args:
        holder: The object that uses the lease, and that is dropped with its optimizer. The lease does not refer to it.

    Attributes:
        dropped: Whether the holder is gone.
        reducer: The present reducer in host memory, or None.
        overlap: The present thread that exchanges buckets early, or None.
        hooks: The hooks on parameters.
        close: Releases memory and channels. Every rank calls it.
    """

    def __init__(self, holder: object) -> None:
        self.dropped = False
        self.reducer: Reducer | None = None
        self.overlap: Overlap | None = None
        self.hooks: list[RemovableHandle] = []
        self.close: Callable[[], None] = _nothing
        self._shared: list[tuple[weakref.ref[torch.Tensor], int]] = []
        weakref.finalize(holder, self._drop).atexit = False

    def share(self, parameters: Sequence[torch.Tensor]) -> None:
        """Note that these parameters lie in memory that all ranks of the host write to, until the lease ends."""
        self._shared = [(weakref.ref(parameter), parameter.data_ptr()) for parameter in parameters]

    def add_hook(self, parameter: torch.Tensor, hook: Callable[..., None]) -> None:
        """Have torch call `hook` with the parameter each time after a backward pass has added to its gradient."""
        self.hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def remove_hooks(self) -> None:
        """Remove all hooks from the parameters."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def _drop(self) -> None:
        self.dropped = True
        self.remove_hooks()
        if self.overlap is not None:
            self.overlap.close()

    def release(self) -> None:
        """Release everything, after all ranks have dropped the optimizer. Every rank calls this."""
        self._unshare()
        self.close()
        if self.overlap is not None:
            self.overlap.join()
        self._forget()

    def leave(self) -> None:
        """Drop everything, after the world has ended. Each rank does this by itself."""
        self._unshare()
        self.remove_hooks()
        if self.overlap is not None:
            self.overlap.close()
            self.overlap.join()
        self._forget()

    @torch.no_grad()
    def _unshare(self) -> None:
        """Give each shared parameter memory of this rank alone."""
        for reference, address in self._shared:
            parameter = reference()
            if parameter is not None and parameter.data_ptr() == address:
                parameter.data = parameter.data.clone()  # the next optimizer may step it on every rank
        self._shared = []

    def _forget(self) -> None:
        self.reducer = self.overlap = None
        self.close = _nothing

    def stand_in(self, owns_shard: bool) -> None:
        """Take part in the steps of the other ranks, after this rank has dropped its optimizer and joined.

        Args:
            owns_shard: Whether this rank has a shard of the parameters, which no other rank steps.

        Raises:
            HvdliteError: The other ranks make steps, and this rank has a shard.
        """
        while self.reducer is not None:
            there = self.reducer.try_to_stand_in()
            if there is None:
                return
            if owns_shard and any(there):
                raise HvdliteError(
                    "this rank has dropped a sharded optimizer with which other ranks still make steps, so nobody steps this "
                    "rank's share of the parameters. Keep the optimizer until all ranks have joined."
                )


def _nothing() -> None:
    """Do nothing: nothing is held."""


def weakly(owner: object, method: str, *args: object) -> Callable[..., None]:
    """Return a hook that calls a method of `owner` with `args` first. The hook does not keep `owner` alive."""
    reference = weakref.ref(owner)

    def call(*more: object) -> None:
        there = reference()
        if there is not None:
            getattr(there, method)(*args, *more)

    return call
