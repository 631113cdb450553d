"""Gradients in flat tensors on a device, and their exchange: what is put on streams, without the host looking at a value.

A bucket holds some of the gradients, one flat tensor for each dtype, and a small tail that is summed with them::

    ├─ gradient 0 ─┼─ gradient 1 ─┼ … ┤     tail: ├ used? of each ┼ `tail_words` of the header ┤

The tail says what the headers say in host memory (`hvdlite.gradients.header`), but nobody has to read it: the sum of the
gradients is divided by the sum of the weights on the device. Only a rank that cannot know the answer by itself reads it, and
waits for it then.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.gpu.collectives import DeviceCollectives
from hvdlite.gradients.device.rules import Rules
from hvdlite.gradients.header import TAIL_WORDS, Header, state_words, tail_words
from hvdlite.gradients.layout import Block, Piece, lay_out, pieces, with_equal_parts
from hvdlite.protocols import Device, ReduceOp, Stream, TensorInfo

_WEIGHT, _STATE = -TAIL_WORDS, -4
_REAL = {"complex64": "float32", "complex128": "float64"}

Layout = Sequence[tuple[TensorInfo, Sequence[int]]]
"""Of each gradient of a model: dtype and shape, and how many elements lie between neighbours along each axis."""


class Flat:
    """The gradients of one dtype.

    Args:
        block: Where each of them lies.
        layout: Of all gradients, by the numbers in `block`.
        device: Where.
        share: The number of the part that this rank gets; None if it gets all.
        wire: The name of the dtype that travels.
        factor: By what gradients are multiplied before they are added, and divided when they are averaged.

    Attributes:
        block: As given.
        memory: Shape ``(length,)``: gradients, and later the combined ones (not if sharded).
        wire: What travels: `memory`, or a copy in another dtype.
        result: Of a sharded bucket: this rank's part of the combined gradients.
        factor: As given.
        numerator, scale: Shape (): ``1 / factor``, and room for what the sums are multiplied by.
        views: Of each gradient, in its shape; and in the order of its memory, if not sharded.
    """

    def __init__(
        self, block: Block, layout: Layout, device: Device, share: int | None, wire: str, factor: float
    ) -> None:
        self.block, self.factor = block, factor
        self._device, self._share, self._layout = device, share, layout
        self.memory = device.zeros([block.length], block.dtype)
        self.wire = self.memory if wire == block.dtype else device.zeros([block.length], wire)
        self.result = self.memory
        if share is not None:
            self.result = device.zeros([block.bounds[share + 1] - block.bounds[share]], block.dtype)
        self.numerator = device.empty([], "float64")
        device.fill(self.numerator, 1 / factor)
        self.scale = device.empty([], _REAL.get(block.dtype, block.dtype))
        self.views = self._views()
        self._own_uses = device.users(self.memory)

    def _views(self) -> dict[int, Any]:
        views = {}
        for index, span in self.block.spans.items():
            info, strides = self._layout[index]
            piece = self.memory[span.start : span.stop]
            views[index] = (
                self._device.strided(piece, info.shape, strides)
                if self._share is None
                else self._device.shaped(piece, info.shape)
            )
        return views

    def is_held(self, at_home: int) -> bool:
        """Whether the program holds some of the memory, beside so many gradients that are where they are expected."""
        return self._device.users(self.memory) > self._own_uses + at_home

    def renew(self) -> None:
        """Leave the memory to the program, and take other memory."""
        old = self.memory
        self.memory = self._device.zeros([self.block.length], self.block.dtype)
        self.wire = self.memory if self.wire is old else self.wire
        self.result = self.memory if self.result is old else self.result
        self.views = self._views()

    def counts(self) -> list[int]:
        """The lengths of the parts."""
        bounds = self.block.bounds
        return [stop - start for start, stop in itertools.pairwise(bounds)]


class DeviceBucket:
    """Gradients that are exchanged together. All ranks make one, with equal arguments.

    Args:
        layout: Of all gradients of the model.
        tensors: The numbers of those in this bucket.
        collectives: Whose ranks take part, and where.
        rules: How.

    Attributes:
        tensors, collectives: As given.
        flats: Their memory.
        views: Where each gradient is expected, and where the combined one is afterwards.
        tail: See the module; shape ``(len(tensors) + TAIL_WORDS,)``, float64.

    Raises:
        Device.no_memory: There is no room for it.
        UnsupportedTensorError: A dtype that has no gradients.
    """

    def __init__(self, layout: Layout, tensors: Sequence[int], collectives: DeviceCollectives, rules: Rules) -> None:
        self.tensors = tuple(tensors)
        self.collectives = collectives
        self._device = device = collectives.device
        self._rules = rules
        self._share = None if rules.parts is None else collectives.rank
        blocks = lay_out([info for info, _ in layout], rules.parts or 1, rules.whole, self.tensors)
        if not rules.whole:
            blocks = [with_equal_parts(block) for block in blocks]
        self.flats = []
        for block in blocks:
            wire, factor = rules.wire_of(block.dtype), rules.factor(block.dtype, collectives.size)
            self.flats.append(Flat(block, layout, device, self._share, wire, factor))
        self.views = {index: view for flat in self.flats for index, view in flat.views.items()}
        self.tail = device.zeros([len(self.tensors) + TAIL_WORDS], "float64")
        self._weight = self.tail[_WEIGHT]
        self._all_used = (True,) * len(self.tensors)
        self._usual = device.zeros([len(self.tensors) + TAIL_WORDS], "float64")
        self._write(self._usual, self._all_used, Header())
        self._usual_state = 0

    def at_home(self, gradients: Sequence[Any]) -> list[bool]:
        """For each gradient, in the order of `tensors`, whether it is where the bucket expects it.

        It does not matter what a program has done to the tensor object.
        """
        is_same, views = self._device.is_same, self.views
        return [
            gradient is not None and is_same(gradient, views[index])
            for index, gradient in zip(self.tensors, gradients, strict=True)
        ]

    def leave_what_is_held(self, at_home: Sequence[bool]) -> list[Any]:
        """Take other memory where the program still holds what it was given, apart from this step's gradients.

        Args:
            at_home: Of these.

        Returns:
            New memory. In it no gradient is at home.
        """
        home = {index for index, each in zip(self.tensors, at_home, strict=True) if each}
        renewed = []
        for flat in self.flats:
            if flat.is_held(len(home.intersection(flat.views))):
                flat.renew()
                self.views.update(flat.views)
                renewed.append(flat.memory)
        return renewed

    def memory(self) -> list[Any]:
        """All that the communication stream works on."""
        found = [self.tail]
        for flat in self.flats:
            found += [flat.memory, flat.wire, flat.result, flat.numerator, flat.scale]
        return found

    def pieces(self) -> list[tuple[Piece, Any]]:
        """What this rank answers for, each with its elements in `Flat.result`."""
        assert self._share is not None
        found = []
        for flat in self.flats:
            begin = flat.block.bounds[self._share]
            for piece in pieces(flat.block, self._share):
                start = flat.block.spans[piece.tensor].start + piece.start - begin
                found.append((piece, flat.result[start : start + piece.stop - piece.start]))
        return found

    @property
    def versions(self) -> tuple[int, ...]:
        """Change when somebody writes into the memory by the framework's operations, where it counts these."""
        return tuple([self._device.version(flat.memory) for flat in self.flats])

    def pack(self, gradients: Sequence[Any], at_home: Sequence[bool], weight: float) -> None:
        """Put this rank's gradients where they are expected, on the current stream.

        Args:
            gradients: In the order of `tensors`: like the layout; None counts as zeros.
            at_home: Which of them are there already.
            weight: This rank's; with 0 gradients may be anything, and count as zeros.
        """
        if weight == 0:
            for flat in self.flats:
                self._device.fill(flat.memory, 0)
            return
        views, sources, unused = [], [], []
        for index, gradient, home in zip(self.tensors, gradients, at_home, strict=True):
            if gradient is None:
                unused.append(self.views[index])
            elif not home:
                views.append(self.views[index])
                sources.append(gradient)
        if views:
            self._device.copy_all(sources, views)
        if unused:
            self._device.clear_all(unused)

    def say(self, used: tuple[bool, ...], said: Header) -> None:
        """Write the tail, on the current stream.

        Args:
            used: In the order of `tensors`, whether this rank has a gradient.
            said: What else this rank says.
        """
        if used != self._all_used or said.joined or said.again:
            self._write(self.tail, used, said)
            return
        if said.state != self._usual_state:
            self._usual_state = said.state
            for number, value in enumerate(state_words(said.state), _STATE):
                self._device.fill(self._usual[number], value)  # no copy from the host, which might wait
        self._device.copy(self._usual, self.tail)
        if said.weight != 1.0:
            self._device.fill(self._weight, said.weight)

    def _write(self, tail: Any, used: tuple[bool, ...], said: Header) -> None:
        self._device.from_host(np.array([*used, *tail_words(said)], np.float64), tail)

    def scale_before(self, weight: float) -> None:
        """Multiply by this rank's weight, and make what travels; on the current stream."""
        for flat in self.flats:
            factor = weight * flat.factor
            if flat.wire is not flat.memory:
                self._device.scale_into(flat.memory, factor, flat.wire)
            elif factor != 1.0:
                self._device.scale(flat.memory, factor)

    def exchange(self, stream: Stream) -> None:
        """Sum over the ranks and divide, on `stream`, which is the current one. All ranks go through the buckets in order."""
        collectives = self.collectives
        with collectives.group():
            collectives.allreduce(self.tail, ReduceOp.SUM, stream)
            for flat in self.flats:
                if self._share is None:
                    collectives.allreduce(flat.wire, ReduceOp.SUM, stream)
                else:
                    collectives.reduce_scatter(flat.wire, flat.result, flat.counts(), ReduceOp.SUM, stream)
        for flat in self.flats:
            if flat.wire is not flat.memory:
                self._device.copy(flat.wire, flat.memory)
            if self._rules.average:
                self._device.scale_by_ratio(flat.result, flat.numerator, self._weight, flat.scale)
