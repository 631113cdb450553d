"""`HostGradients`: the dense gradients of some parameters in the memory of one reducer.

Hooks and the step bring gradients there. `LargeGradients` and `SmallGradients` bring the combined gradients back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite.gradients.overlap import Overlap
from hvdlite.gradients.reducer import Reducer
from hvdlite_torch.step.lease import weakly
from hvdlite_torch.step.shards import refuse_sparse
from hvdlite_torch.sync.encoded import Encodings
from hvdlite_torch.sync.large_gradients import LargeGradients
from hvdlite_torch.sync.slot import Slot
from hvdlite_torch.sync.small_gradients import SmallGradients
from hvdlite_torch.tensors.gradient import as_dense


class HostGradients:
    """The gradients of one layout on one rank. It is replaced when the parameters or the plan change.

    `LargeGradients` looks at large gradients one by one. `SmallGradients` copies small ones all at once.

    Args:
        parameters: One for each tensor of `reducer`.
        reducer: Combines the gradients.
        overlapped: Whether the reducer's buckets are exchanged while backward passes go on.
        encodings: The compressed gradients; None if gradients are not compressed.
        sharded: Whether each rank steps its shard. Then sparse gradients are refused. If not, a single rank copies nothing,
            because its gradients are the results.
        sparse_as_dense: Whether sparse gradients are made dense.

    Attributes:
        overlap: Exchanges buckets early; None if nothing is exchanged early.
        slots: One for each parameter.
        parts: The large and the small gradients. After an exchange each part delivers its results.
        news: The numbers of the gradients that the last `collect` has found to be sparse.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        reducer: Reducer,
        overlapped: bool,
        encodings: Encodings | None,
        sharded: bool,
        sparse_as_dense: bool,
    ) -> None:
        self.parameters = parameters
        self.reducer = reducer
        self.overlap = Overlap(reducer, weakly(self, "_choose_buffer")) if overlapped else None
        self.news: list[int] = []
        self._sparse_as_dense = sparse_as_dense
        self._sharded = sharded
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
        self._large = LargeGradients(large, of_large, reducer.buckets, self.overlap, alone and not sharded)
        self._small = SmallGradients(small, of_small, alone and not sharded)
        self.parts = (self._large, self._small)

    def take(self, index: int, parameter: torch.Tensor, weight: float) -> None:
        """Copy a large gradient to which a backward pass has added, while it is in the cache, if other ranks read any of it.

        Args:
            index: The number of the parameter.
            parameter: The parameter, with its gradient.
            weight: The batch weight, as far as the program has said it.
        """
        slot = self.slots[index]
        if self.overlap is not None:
            gradient = parameter.grad
            if gradient is not None and self.overlap.may_copy(index) and slot.copy(gradient):
                self.overlap.ready(index, weight)
        elif not (slot.reduced_in_place or slot.apart or slot.alone):
            slot.take(parameter)

    def _choose_buffer(self, number: int) -> None:
        """Choose the result buffer of a bucket, before the bucket is exchanged early: see `LargeGradients.choose_buffer`."""
        self._large.choose_buffer(number)

    def collect(self) -> tuple[list[bool], bool]:
        """Bring all gradients to where they are reduced.

        Returns:
            For each parameter, whether this rank has a dense gradient; and whether a gradient has changed since it was copied.
        """
        used = [True] * len(self.slots)
        self.news = []
        changed = self._large.collect(used, self._checked)
        self._small.follow_buffers(not any(bucket.pool.number for bucket in self.reducer.buckets))
        self._small.collect(used, self._checked)
        return used, changed

    def _checked(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient as a dense one. If it is sparse and stays so, note its number in `news` and return None."""
        dense = as_dense(gradient, slot.shape, slot.dtype, self._sparse_as_dense)
        if dense is None:
            if self._sharded:
                refuse_sparse(slot.shape)
            self.news.append(slot.index)
        return dense

    def forget(self) -> None:
        """Forget where the gradients of this step are."""
        self._large.forget()

    def drain(self) -> None:
        """Finish the exchanges that the backward pass has begun, and drop their results. Every rank calls this."""
        if self.overlap is not None:
            for bucket in self.reducer.buckets[self.overlap.under_way :]:
                bucket.pool.number = 1  # the program may hold views of the other buffer
            self.overlap.drain()

    def leave(self) -> None:
        """Give each gradient memory of its own where ``p.grad`` is memory of the reducer."""
        for slot, parameter in zip(self.slots, self.parameters, strict=True):
            slot.leave(parameter)

    def close(self) -> None:
        """Give the gradients memory of their own, and end the thread that exchanges buckets. The reducer stays open."""
        self.leave()
        if self.overlap is not None:
            self.overlap.close()
            self.overlap.join()
