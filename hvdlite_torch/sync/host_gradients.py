"""The dense gradients of some parameters in the memory of one reducer: brought there by hooks and the step, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvdlite.gradients.overlap import Overlap
from hvdlite.gradients.reducer import Reducer
from hvdlite_torch.step.lease import weakly
from hvdlite_torch.sync.encoded import Encodings
from hvdlite_torch.sync.large_gradients import LargeGradients
from hvdlite_torch.sync.slot import Slot
from hvdlite_torch.sync.small_gradients import SmallGradients
from hvdlite_torch.tensors.gradient import as_dense


class HostGradients:
    """Where gradients lie in host memory, on one rank, as long as parameters and plan stay as they are.

    Large gradients are looked at one by one (`LargeGradients`), small ones are copied all at once (`SmallGradients`).

    Args:
        parameters: One for each tensor of `reducer`.
        reducer: Combines them.
        overlapped: The reducer's buckets are exchanged while backward passes go on.
        encodings: What is exchanged in place of gradients; None if they are not compressed.
        trivial_alone: Where there is one rank, gradients are their own results and nothing is copied.
        sparse_as_dense: Make sparse gradients dense.
        refuse_sparse: Called with the shape of a parameter that has a sparse gradient, which the caller may not support.

    Attributes:
        parameters, reducer: As given.
        overlap: Exchanges buckets early; None if nothing does.
        slots: One for each parameter.
        news: The numbers of the gradients that the last `collect` has found to be sparse.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        reducer: Reducer,
        overlapped: bool,
        encodings: Encodings | None,
        trivial_alone: bool,
        sparse_as_dense: bool,
        refuse_sparse: Callable[[Sequence[int]], None],
    ) -> None:
        self.parameters = parameters
        self.reducer = reducer
        self.overlap = Overlap(reducer, weakly(self, "_choose_buffer")) if overlapped else None
        self.news: list[int] = []
        self._sparse_as_dense = sparse_as_dense
        self._refuse_sparse = refuse_sparse
        alone = reducer.alone and encodings is None
        self.slots = [
            Slot(
                index,
                parameter,
                reducer.bucket_of(index),
                None if encodings is None else encodings.of(parameter),
                alone,
            )
            for index, parameter in enumerate(parameters)
        ]
        large: list[Slot] = []
        small: list[Slot] = []
        for slot in self.slots:
            (large if slot.large or slot.compressed else small).append(slot)
        of_large, of_small = ([parameters[slot.index] for slot in some] for some in (large, small))
        self._large = LargeGradients(large, of_large, reducer.buckets, self.overlap, alone and trivial_alone)
        self._small = SmallGradients(small, of_small, alone and trivial_alone)

    def take(self, index: int, parameter: torch.Tensor, weight: float) -> None:
        """A backward pass has added to a large gradient: copy it, while it is in the cache, if other ranks read any of it.

        Args:
            index: The number of the parameter.
            parameter: With its gradient.
            weight: That of the batch, as far as the program has said it.
        """
        slot = self.slots[index]
        if self.overlap is not None:
            gradient = parameter.grad
            if gradient is not None and self.overlap.may_copy(index) and slot.copy(gradient):
                self.overlap.ready(index, weight)
        elif not (slot.stays or slot.apart or slot.alone):
            slot.take(parameter)

    def _choose_buffer(self, number: int) -> None:
        """See `LargeGradients.choose_buffer`. Called before a bucket is exchanged early."""
        self._large.choose_buffer(number)

    def collect(self) -> tuple[list[bool], bool]:
        """See that gradients are where they are reduced.

        Returns:
            For each parameter, whether this rank has a dense gradient; and whether one has changed since it was copied.
        """
        used = [True] * len(self.slots)
        self.news = []
        changed = self._large.collect(used, self._checked)
        self._small.follow_buffers(not any(bucket.pool.number for bucket in self.reducer.buckets))
        self._small.collect(used, self._checked)
        return used, changed

    def _checked(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor | None:
        """A gradient that can be exchanged as a dense one; None if it cannot, and is among the news."""
        dense = as_dense(gradient, slot.shape, slot.dtype, self._sparse_as_dense)
        if dense is None:
            self._refuse_sparse(slot.shape)
            self.news.append(slot.index)
        return dense

    def deliver(self, anywhere: Sequence[bool]) -> None:
        """Let ``p.grad`` be the combined gradients.

        Args:
            anywhere: For each parameter, whether any rank has a gradient of it.
        """
        self._large.deliver(anywhere)
        self._small.deliver(anywhere)

    def forget(self) -> None:
        """The step does not need to know any more where gradients are."""
        self._large.forget()

    def drain(self) -> None:
        """End what the backward pass has begun to exchange, and forget it. Every rank calls this."""
        if self.overlap is not None:
            for bucket in self.reducer.buckets[self.overlap.under_way :]:
                bucket.pool.number = 1  # the program may hold what is in the other buffer
            self.overlap.drain()

    def leave(self) -> None:
        """Let gradients have memory of their own."""
        for slot, parameter in zip(self.slots, self.parameters, strict=True):
            slot.leave(parameter)

    def close(self) -> None:
        """End the thread that exchanges buckets, if there is one. The reducer stays."""
        self.leave()
        if self.overlap is not None:
            self.overlap.close()
            self.overlap.join()
