"""`ParameterBucket`: a bucket of gradients with their parameters. Each rank steps its share of the parameters.

The parameters lie in flat memory with the layout of the gradients, so nothing is copied to gather them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdlite.comm.gpu.collectives import DeviceCollectives
from hvdlite.gradients.device.bucket import DeviceBucket, Layout
from hvdlite.gradients.device.rules import Rules
from hvdlite.protocols import Stream


class ParameterBucket(DeviceBucket):
    """A bucket of gradients, with their parameters in flat memory of the same layout.

    Args:
        layout, tensors, collectives, rules: See `DeviceBucket`.
    """

    def __init__(self, layout: Layout, tensors: Sequence[int], collectives: DeviceCollectives, rules: Rules) -> None:
        super().__init__(layout, tensors, collectives, rules)
        self._memories = [self._device.zeros([flat.block.length], flat.block.dtype) for flat in self.flats]

    def memory(self) -> list[Any]:
        return [*super().memory(), *self._memories]

    def parameters(self) -> dict[int, Any]:
        """Return the flat memory for each parameter, by its number."""
        return {
            index: memory[span.start : span.stop]
            for flat, memory in zip(self.flats, self._memories, strict=True)
            for index, span in flat.block.spans.items()
        }

    def gather(self, stream: Stream) -> None:
        """Give all ranks the shares of the parameters of all ranks, on `stream`."""
        with self.collectives.group():
            for flat, memory in zip(self.flats, self._memories, strict=True):
                start, stop = flat.block.bounds[self.collectives.rank :][:2]
                self.collectives.allgather(memory[start:stop], memory, flat.counts(), stream)
