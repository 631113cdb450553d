"""`LargeGradients`: a large gradient is reduced where it lies if no other rank reads it, and copied to the reducer if not."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite.gradients.bucket import Bucket
from hvdlite.gradients.overlap import Overlap
from hvdlite_torch.sync.slot import Check, GradientPlace, Slot
from hvdlite_torch.tensors.ownership import overlapping


class LargeGradients:
    """The large gradients of an optimizer, on one rank.

    Args:
        slots: The slots of the large parameters.
        parameters: One for each slot.
        buckets: All buckets of the reducer.
        overlap: Exchanges early what the hooks copy; None if nothing is exchanged early.
        trivial: Whether gradients are their own results, so that nothing is copied.

    Attributes:
        slots: The slots of the large parameters.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        parameters: Sequence[torch.Tensor],
        buckets: Sequence[Bucket],
        overlap: Overlap | None,
        trivial: bool,
    ) -> None:
        self.slots = slots
        self._pairs = list(zip(slots, parameters, strict=True))
        self._buckets = buckets
        self._overlap = overlap
        self._trivial = trivial
        there = {slot.index: slot for slot in slots}
        self._in_bucket = [[there[i] for i in bucket.tensors if i in there] for bucket in buckets]
        self._met: list[tuple[Slot, torch.Tensor]] = []
        """The slots, each with its parameter, whose gradients share memory with another gradient in this step."""

    def choose_buffer(self, number: int) -> None:
        """Choose the result buffer of a bucket on this rank: the second one if the program holds views of the first."""
        self._buckets[number].pool.number = int(any(slot.is_held for slot in self._in_bucket[number]))

    def collect(self, used: list[bool], check: Check) -> bool:
        """Bring the large gradients to where they are reduced.

        Args:
            used: Whether this rank has a gradient, by the number of the slot. Becomes False where the rank has none.
            check: Makes a gradient dense, or returns None.

        Returns:
            Whether a gradient has changed since it was copied, so that exchanged copies are wrong.
        """
        held = [slot.find(parameter) for slot, parameter in self._pairs]
        meet = self._meet()
        if self._overlap is not None:
            return self._collect_early(self._overlap, used, check)
        self._collect_now(used, check, int(meet or any(held)))
        return False

    def _meet(self) -> bool:
        """Find the gradients that share memory with each other; these are copied. Return whether there are some."""
        self._met = []
        if self._trivial:
            return False
        there = [(pair, gradient) for pair in self._pairs if (gradient := pair[1].grad) is not None]
        dense = [(pair, gradient) for pair, gradient in there if gradient.layout is torch.strided]
        found = overlapping([gradient for _, gradient in dense], [gradient.nbytes for _, gradient in dense])
        self._met = [dense[number][0] for number in found]
        for slot, _ in self._met:
            slot.where = GradientPlace.ELSEWHERE
        return bool(found)

    def _collect_now(self, used: list[bool], check: Check, buffer: int) -> None:
        self._buckets[0].pool.number = buffer
        for slot, parameter in self._pairs:
            gradient = parameter.grad
            if gradient is None:
                used[slot.index] = False
                continue
            if slot.reduced_in_place and not slot.alone:
                slot.show(gradient if slot.where is GradientPlace.IN_PLACE else None)
            if slot.where is GradientPlace.ELSEWHERE or (slot.where is GradientPlace.IN_BUFFER and buffer):
                dense = check(slot, gradient)
                used[slot.index] = dense is not None
                if dense is not None:
                    slot.load(dense)

    def _collect_early(self, overlap: Overlap, used: list[bool], check: Check) -> bool:
        """Do as `_collect_now`, and compare gradients with copies that a thread exchanges. Return whether one has changed."""
        changed = False
        for slot, parameter in self._pairs:
            gradient = parameter.grad
            if gradient is None:
                used[slot.index] = False
            elif not (overlap.has_copy(slot.index) and slot.is_copy(gradient)):
                changed = changed or overlap.is_under_way(slot.index)
                dense = check(slot, gradient)
                used[slot.index] = dense is not None
                if dense is not None:
                    slot.load(dense)
        for number in range(overlap.under_way, len(self._buckets)):
            self.choose_buffer(number)
        return changed

    def deliver(self, anywhere: Sequence[bool]) -> None:
        """Set ``p.grad`` to the combined gradients.

        Args:
            anywhere: Whether any rank has a gradient, by the number of the slot.
        """
        for slot, parameter in self._pairs:
            if anywhere[slot.index]:
                where = slot.where
                if where is GradientPlace.IN_PLACE or (where is GradientPlace.IN_BUFFER and not slot.pool.number):
                    continue  # the result lies where the gradient lay
                slot.give(parameter)
        for slot, parameter in self._met:
            if anywhere[slot.index]:
                slot.separate(parameter)

    def forget(self) -> None:
        """Forget where the gradients of this step are."""
        for slot in self.slots:
            slot.where = GradientPlace.NOWHERE
