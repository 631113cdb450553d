"""`SmallGradients`: the step copies all small gradients to the reducer at once, and back.

There may be thousands of small gradients, so a microsecond for each one matters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from hvdlite_torch.sync.slot import Check, Slot
from hvdlite_torch.tensors.ownership import is_any_borrowed, overlapping, same_bits, write


class SmallGradients:
    """The small gradients of an optimizer, on one rank. The program never gets the reducer's memory of them.

    Args:
        slots: The slots of the small parameters.
        parameters: One for each slot.
        trivial: Whether gradients are their own results, so that nothing is copied.

    Attributes:
        slots: The slots of the small parameters.
    """

    def __init__(self, slots: Sequence[Slot], parameters: Sequence[torch.Tensor], trivial: bool) -> None:
        self.slots = slots
        self._trivial = trivial
        self._parameters = parameters
        self._like = [(slot.dtype, slot.shape) for slot in slots]
        self._nbytes = [slot.result().nbytes for slot in slots]
        self._home = [slot.source() for slot in slots], [slot.result() for slot in slots]
        self._sources, self._results = self._home
        self._alike: list[torch.Tensor] = []
        """The gradients of this step, if all of them can be copied by one call; empty if not."""

    def follow_buffers(self, all_first: bool) -> None:
        """Use the buffers that the slots use now; the first ones, if `all_first`."""
        self._sources, self._results = self._home
        if not all_first:
            self._sources = [slot.source() for slot in self.slots]
            self._results = [slot.result() for slot in self.slots]

    def collect(self, used: list[bool], check: Check) -> None:
        """Copy the small gradients to the reducer.

        Args:
            used: Whether this rank has a gradient, by the number of the slot. Becomes False where the rank has none.
            check: Makes a gradient dense, or returns None.
        """
        if self._trivial:
            self._make_dense(used, check)
            return
        gradients = [parameter.grad for parameter in self._parameters]
        self._alike = []
        with contextlib.suppress(AttributeError):  # some gradients are None
            if self._like == [(g.dtype, g.shape) for g in gradients if g.layout is torch.strided]:  # type: ignore[union-attr]
                self._alike = gradients  # type: ignore[assignment]
        if self._alike:
            torch._foreach_copy_(self._sources, self._alike)
            return
        for slot, source, gradient in zip(self.slots, self._sources, gradients, strict=True):
            if gradient is not None:
                gradient = check(slot, gradient)
                if gradient is not None:
                    source.copy_(gradient)
            used[slot.index] = gradient is not None

    def _make_dense(self, used: list[bool], check: Check) -> None:
        for slot, parameter in zip(self.slots, self._parameters, strict=True):
            gradient = parameter.grad
            dense = None if gradient is None else check(slot, gradient)
            used[slot.index] = dense is not None
            if dense is not None and dense is not gradient:
                parameter.grad = None  # the present gradient may have another layout
                parameter.grad = dense

    def deliver(self, anywhere: Sequence[bool]) -> None:
        """Copy the combined gradients to ``p.grad``, which is made where only other ranks have a gradient.

        Args:
            anywhere: Whether any rank has a gradient, by the number of the slot.
        """
        if self._trivial:
            return
        gradients, self._alike = self._alike, []
        if gradients and not is_any_borrowed(gradients):
            try:
                torch._foreach_copy_(gradients, self._results)
            except RuntimeError:  # elements of a gradient share memory, or a gradient is an inference tensor
                self._deliver_each(anywhere)
        else:
            self._deliver_each(anywhere)
        self._separate()

    def _deliver_each(self, anywhere: Sequence[bool]) -> None:
        for slot, parameter, result in zip(self.slots, self._parameters, self._results, strict=True):
            if anywhere[slot.index]:
                write(parameter, parameter.grad, result)

    def _separate(self) -> None:
        """Give gradients that share memory a memory each, where the shared memory cannot hold both results."""
        there = [(n, g) for n, parameter in enumerate(self._parameters) if (g := parameter.grad) is not None]
        sizes = self._nbytes if len(there) == len(self._nbytes) else [self._nbytes[n] for n, _ in there]
        for found in overlapping([gradient for _, gradient in there], sizes):
            number, gradient = there[found]
            result = self._results[number]
            if not same_bits(gradient.contiguous(), result):
                self._parameters[number].grad = result.clone()
