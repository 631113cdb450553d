"""`EarlyChunks`: a worker's gradients travel while its backward pass goes on.

A chunk is sent as soon as all its gradients are there. This is speculation: it fails if the program changes gradients between
the backward pass and the step (clips, scales or accumulates them, or leaves the step out). So copies are sent, servers apply
nothing before the push, and the push sends the chunks again that have changed::

    backward   ── chunk 2 ──┬── chunk 1 ──┬── chunk 0 ──┐
    messages                └─── chunk 2 ─┴─── chunk 1 ─┴─ chunk 0 ─┐
    step                                                            └ push: the settings, and what has changed

Each worker speculates by itself. One that has failed leaves it out for some steps: one, then two, then four, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlite.async_sgd.deal import ServerLayout
from hvdlite.async_sgd.worker import Worker
from hvdlite.protocols import Array

_LONGEST_PAUSE = 1024


class EarlyChunks:
    """What one worker sends of its next push before it. The copies are in `Worker.gradients`.

    Args:
        worker: The worker.
        layouts: The servers' parts.

    Attributes:
        failed: In how many steps the speculation has failed.
    """

    def __init__(self, worker: Worker, layouts: Sequence[ServerLayout]) -> None:
        self.failed = 0
        self._worker, self._layouts = worker, layouts
        self._chunk_of = {
            layout.tensors[place]: (server, number)
            for server, layout in enumerate(layouts)
            for number, chunk in enumerate(layout.chunks)
            for place in chunk.places
        }
        self._pause = self._left = 0
        self._begin_step()

    def _begin_step(self) -> None:
        self._copied: set[int] = set()
        self._missing = [[len(chunk.places) for chunk in layout.chunks] for layout in self._layouts]
        self._sent = [np.zeros(len(layout.chunks), bool) for layout in self._layouts]
        self._has_failed = False

    def may_copy(self, number: int) -> bool:
        """Return whether the gradient of a tensor is to be copied before the step: not if there is a copy already."""
        return not self._left and number not in self._copied

    def has_copy(self, number: int) -> bool:
        """Return whether the gradient of a tensor was copied in this step."""
        return number in self._copied

    def ready(self, number: int) -> None:
        """Note that a copy of the gradient of a tensor is there, and send its chunk if that is complete.

        Raises:
            HvdliteError: The server has left the job, or the channel is closed.
        """
        self._copied.add(number)
        server, chunk = self._chunk_of[number]
        self._missing[server][chunk] -= 1
        if not self._missing[server][chunk]:
            self._sent[server][chunk] = True
            self._worker.send_early(server, chunk)

    def change(self, number: int) -> None:
        """Note that the gradient of a tensor is not the copy, and wait until the copy may be overwritten."""
        server, chunk = self._chunk_of[number]
        if self._sent[server][chunk]:
            self._sent[server][chunk], self._has_failed = False, True
            self._worker.settle()

    def end_step(self) -> list[Array]:
        """Return for each server which chunks it has: bool, shape ``(chunks,)``. Then begin another step."""
        sent = self._sent
        if self._left:
            self._left -= 1
        elif self._has_failed:
            self.failed += 1
            self._pause = self._left = min(max(1, 2 * self._pause), _LONGEST_PAUSE)
        elif self._copied:
            self._pause = 0
        self._begin_step()
        return sent
