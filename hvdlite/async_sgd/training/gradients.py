"""`LocalGradients`: one worker's gradients, added up until the next push."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic

import numpy as np

from hvdlite.async_sgd.deal import ServerLayout
from hvdlite.async_sgd.early import EarlyChunks
from hvdlite.async_sgd.rows import Rows, add_rows
from hvdlite.async_sgd.training.replica import Gradient, Replica
from hvdlite.errors import ArgumentError
from hvdlite.protocols import Array


class LocalGradients(Generic[Gradient]):
    """Adds the gradients of each step to those of the steps before it, in the memory from which they are pushed.

    Args:
        replica: The parameters.
        layouts: The servers' parts.
        memory: For each server, the memory of a push.
        rank: The number of this rank in the job, for error texts.
        early: What is sent before the push.
        refuses_nan: Whether NaN and infinity are errors.

    Attributes:
        steps: The number of steps since the last push.
        weight: The weights of these steps, added up.
        present: For each server, which of its tensors have a gradient in the memory: bool, shape ``(tensors,)``.
        rows: For each server, the sparse gradients by the places of their tensors. They are not in the memory.
    """

    def __init__(
        self,
        replica: Replica[Gradient],
        layouts: Sequence[ServerLayout],
        memory: Sequence[Array],
        rank: int,
        early: EarlyChunks,
        refuses_nan: bool,
    ) -> None:
        self._replica, self._rank, self._early, self._refuses_nan = replica, rank, early, refuses_nan
        self._memory: dict[int, Array] = {}
        self._place: dict[int, tuple[int, int]] = {}
        for server, (layout, data) in enumerate(zip(layouts, memory, strict=True)):
            self._memory |= slices(data, layout, replica.sizes)
            self._place |= {number: (server, place) for place, number in enumerate(layout.tensors)}
        self.present = [np.zeros(len(layout.tensors), bool) for layout in layouts]
        self.rows: list[dict[int, Rows]] = [{} for _ in layouts]
        self.steps, self.weight = 0, 0.0

    def ready(self, number: int, gradient: Gradient) -> None:
        """Send a gradient early, perhaps: copy it, and send its chunk if that is complete.

        Raises:
            HvdliteError: The server has left the job, or the channel is closed.
        """
        if self._early.may_copy(number):
            self._replica.put(number, gradient, self._memory[number], False)
            self._early.ready(number)

    def add(self, given: Mapping[int, Gradient | Rows], weight: float) -> None:
        """Add the gradients of a step.

        Args:
            given: The gradients that there are, by the numbers of their parameters.
            weight: The number of samples. A step of 0 samples has no gradients, whatever is given.

        Raises:
            ArgumentError: A gradient has NaN or infinite elements, and they are errors. Nothing was added.
        """
        if not weight > 0:
            given = {}
        if self._refuses_nan:
            check_finite(self._replica, given, self._rank)
        for number, gradient in given.items():
            server, place = self._place[number]
            present, rows = self.present[server], self.rows[server]
            if isinstance(gradient, Rows) and not present[place]:
                rows[place] = add_rows(rows[place], gradient) if place in rows else gradient
                continue
            if isinstance(gradient, Rows) or not self._is_copied(number, gradient):
                self._replica.put(number, gradient, self._memory[number], bool(present[place]))
            present[place] = True
            if place in rows:
                self._replica.put(number, rows.pop(place), self._memory[number], True)
        self.steps += 1
        self.weight += weight

    def _is_copied(self, number: int, gradient: Gradient) -> bool:
        if not self._early.has_copy(number):
            return False
        if self._replica.is_there(number, gradient, self._memory[number]):
            return True
        self._early.change(number)
        return False

    def clear(self) -> None:
        """Begin anew, after a push."""
        self.steps, self.weight = 0, 0.0
        for present, rows in zip(self.present, self.rows, strict=True):
            present[:] = False
            rows.clear()


def check_finite(replica: Replica[Gradient], given: Mapping[int, Gradient | Rows], rank: int) -> None:
    """Raise ArgumentError if a gradient of this rank, given by the number of its parameter, has NaN or infinite elements."""
    for number, gradient in given.items():
        if not replica.is_finite(number, gradient):
            raise ArgumentError(
                f"rank {rank}: the gradient of {replica.names[number]} has elements that are NaN or infinite, so nothing of "
                f"this step was pushed, and no server has changed. Use a smaller learning rate or {replica.clipping}, or leave "
                'out this batch; on_nan="pass on" pushes it as it is.'
            )


def slices(data: Array, layout: ServerLayout, sizes: Sequence[int]) -> dict[int, Array]:
    """Return the bytes of each tensor of a layout in a message, by the tensors' numbers.

    Args:
        data: The message: uint8, shape ``(layout.nbytes,)``.
        layout: The places of the tensors.
        sizes: The bytes of each tensor.
    """
    places = zip(layout.tensors, layout.starts, strict=True)
    return {number: data[start : start + sizes[number]] for number, start in places}
