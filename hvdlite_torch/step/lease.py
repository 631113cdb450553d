"""What a distributed optimizer holds beyond itself: shared memory, channels, a thread, hooks on parameters.

A program drops an optimizer when it likes, and Python may notice that later on one rank than on another. To release memory and
channels all ranks are needed. So what a dropped optimizer held is kept until all ranks meet to make another one, and have all
dropped it (`hvdlite.group.Group.release_dropped`).
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
    """Of one optimizer, on one rank.

    Args:
        holder: What uses it; is dropped with its optimizer. Nothing here refers to it.

    Attributes:
        dropped: The holder is gone.
        reducer, overlap: The present ones; None if there are none.
        hooks: On parameters.
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
        """These lie in memory that all ranks of the host write to, as long as this is held."""
        self._shared = [(weakref.ref(parameter), parameter.data_ptr()) for parameter in parameters]

    def add_hook(self, parameter: torch.Tensor, hook: Callable[..., None]) -> None:
        """Have torch call `hook` with the parameter each time that a backward pass has added to its gradient."""
        self.hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def remove_hooks(self) -> None:
        """Leave the parameters alone."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def _drop(self) -> None:
        self.dropped = True
        self.remove_hooks()
        if self.overlap is not None:
            self.overlap.close()

    def release(self) -> None:
        """All ranks have dropped it. Every rank calls this."""
        self._part()
        self.close()
        if self.overlap is not None:
            self.overlap.join()
        self._forget()

    def leave(self) -> None:
        """The world has ended, and with it all that was held there. This is each rank's own affair."""
        self._part()
        self.remove_hooks()
        if self.overlap is not None:
            self.overlap.close()
            self.overlap.join()
        self._forget()

    @torch.no_grad()
    def _part(self) -> None:
        """Give each parameter memory of this rank alone."""
        for reference, address in self._shared:
            parameter = reference()
            if parameter is not None and parameter.data_ptr() == address:
                parameter.data = parameter.data.clone()  # the next optimizer may step it on every rank
        self._shared = []

    def _forget(self) -> None:
        self.reducer = self.overlap = None
        self.close = _nothing

    def stand_in(self, owns_share: bool) -> None:
        """Take part in what other ranks still do with their optimizers, after this rank has dropped its own.

        Args:
            owns_share: Nobody else steps this rank's share of the parameters.

        Raises:
            HvdliteError: They make steps, and it does.
        """
        while self.reducer is not None:
            there = self.reducer.try_to_stand_in()
            if there is None:
                return
            if owns_share and any(there):
                raise HvdliteError(
                    "this rank has dropped a sharded optimizer with which other ranks still make steps, so nobody steps this "
                    "rank's share of the parameters. Keep the optimizer until all ranks have joined."
                )


def _nothing() -> None:
    """Nothing is held."""


def weakly(owner: object, method: str, *args: object) -> Callable[..., None]:
    """A hook that calls a method of `owner` with `args` first, as long as that is there, which it does not keep."""
    reference = weakref.ref(owner)

    def call(*more: object) -> None:
        there = reference()
        if there is not None:
            getattr(there, method)(*args, *more)

    return call
