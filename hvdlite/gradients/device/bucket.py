"""Gradients in flat tensors on a device, and their exchange. All work is put on streams; the host looks at no value.

A bucket holds some of the gradients, in one flat tensor for each dtype. The device divides the sum of the gradients by the sum
of the weights, which travels with the first bucket of a step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

from hvdlite.comm.gpu.collectives import DeviceCollectives
from hvdlite.gradients.device.rules import Rules
from hvdlite.gradients.layout import Block, Piece, lay_out, pieces, with_equal_parts
from hvdlite.protocols import Device, ReduceOp, Stream, TensorInfo

_REAL = {"complex64": "float32", "complex128": "float64"}

Layout = Sequence[tuple[TensorInfo, Sequence[int]]]
"""For each gradient of a model: its dtype and shape, and its strides in elements."""


class FlatGradients:
    """The gradients of one dtype in a bucket.

    Args:
        block: Where each gradient lies.
        layout: The layout of all gradients of the model. The numbers in `block` are indices of it.
        device: The device of the memory.
        share: The number of the part of the result that this rank gets; None if it gets all parts (not sharded).
        wire: The name of the dtype that travels.
        factor: The gradients are multiplied by this factor before they are added, and divided by it when they are averaged.

    Attributes:
        block: Where each gradient lies.
        memory: Shape ``(length,)``: this rank's gradients; after an exchange the combined gradients, unless sharded.
        wire: The tensor that travels: `memory`, or a copy in another dtype.
        result: The combined gradients: `memory`, or a tensor with this rank's part if sharded.
        factor: The gradients are multiplied by this factor before they are added.
        numerator, scale: Shape (): ``1 / factor``, and scratch memory for the number by which the sums are multiplied.
        views: For each gradient, by its number, a view of `memory` in its shape, and with its strides unless sharded.
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
        """Return whether the program holds tensors of the memory other than the `at_home` gradients at their places."""
        return self._device.users(self.memory) > self._own_uses + at_home

    def renew(self) -> None:
        """Leave the memory to the program, and take new memory."""
        old = self.memory
        self.memory = self._device.zeros([self.block.length], self.block.dtype)
        self.wire = self.memory if self.wire is old else self.wire
        self.result = self.memory if self.result is old else self.result
        self.views = self._views()

    def counts(self) -> list[int]:
        """Return the lengths of the parts."""
        bounds = self.block.bounds
        return [stop - start for start, stop in itertools.pairwise(bounds)]


class DeviceBucket:
    """Gradients that are exchanged together. All ranks make one, with equal arguments.

    Args:
        layout: The layout of all gradients of the model.
        tensors: The numbers of the gradients in this bucket.
        collectives: The collectives of the ranks that take part, on the device of the gradients.
        rules: How gradients are scaled, cast and cut into shares.

    Attributes:
        tensors: The numbers of the gradients in this bucket.
        collectives: The collectives of the ranks that take part.
        flats: The memory of the gradients, one object for each dtype.
        views: For each gradient, by its number, the tensor where the gradient is expected. After an exchange the combined
            gradient is there, unless the bucket is sharded.

    Raises:
        Device.no_memory: The device has not enough memory.
        UnsupportedTensorError: A dtype is neither floating-point nor complex.
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
            self.flats.append(FlatGradients(block, layout, device, self._share, wire, factor))
        self.views: dict[int, Any] = {}
        self._where: dict[int, tuple[Any, ...]] = {}
        for flat in self.flats:
            self._enter(flat)

    def _enter(self, flat: FlatGradients) -> None:
        """Expect gradients in the present memory of `flat`."""
        self.views.update(flat.views)
        self._where.update((index, self._device.where(view)) for index, view in flat.views.items())

    def at_home(self, gradients: Sequence[Any]) -> list[bool]:
        """Return for each gradient, in the order of `tensors`, whether it lies where the bucket expects it.

        The program may have replaced the tensor object: only memory, shape, strides and dtype count.
        """
        is_at, where = self._device.is_at, self._where
        return [
            gradient is not None and is_at(gradient, where[index])
            for index, gradient in zip(self.tensors, gradients, strict=True)
        ]

    def leave_what_is_held(self, at_home: Sequence[bool]) -> list[Any]:
        """Replace memory of which the program holds tensors other than this step's gradients.

        Args:
            at_home: The result of the method `at_home` for this step's gradients.

        Returns:
            The new memory. No gradient is at home in it.
        """
        home = {index for index, each in zip(self.tensors, at_home, strict=True) if each}
        renewed = []
        for flat in self.flats:
            if flat.is_held(len(home.intersection(flat.views))):
                flat.renew()
                self._enter(flat)
                renewed.append(flat.memory)
        return renewed

    def memory(self) -> list[Any]:
        """Return all tensors that the communication stream works on."""
        found = []
        for flat in self.flats:
            found += [flat.memory, flat.wire, flat.result, flat.numerator, flat.scale]
        return found

    def pieces(self) -> list[tuple[Piece, Any]]:
        """Return the pieces of gradients that this rank owns, each with its elements in `FlatGradients.result`."""
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
        """The versions of the memory. They change when the framework's operations write to it, if the framework counts them."""
        return tuple([self._device.version(flat.memory) for flat in self.flats])

    def pack(self, gradients: Sequence[Any], at_home: Sequence[bool], weight: float) -> None:
        """Copy this rank's gradients to where they are expected, on the current stream.

        Args:
            gradients: The gradients in the order of `tensors`, with the dtypes and shapes of the layout; None counts as zeros.
            at_home: For each gradient, whether it is there already.
            weight: The weight of this rank. If it is 0, the gradients may have any value, and count as zeros.
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

    def scale_before(self, weight: float) -> None:
        """Multiply the gradients by this rank's weight, and fill `FlatGradients.wire`, on the current stream."""
        for flat in self.flats:
            factor = weight * flat.factor
            if flat.wire is not flat.memory:
                self._device.scale_into(flat.memory, factor, flat.wire)
            elif factor != 1.0:
                self._device.scale(flat.memory, factor)

    def exchange(self, stream: Stream, weight: Any, with_it: Sequence[Any]) -> None:
        """Sum over the ranks and divide, on `stream`, which is current. All ranks exchange their buckets in the same order.

        Args:
            stream: The stream for the work.
            weight: The sum of the weights of all ranks, float64 and shape ``()``. It may be a part of `with_it`.
            with_it: Other tensors that are summed over the ranks at the same time.
        """
        collectives = self.collectives
        with collectives.group() if with_it or len(self.flats) > 1 else contextlib.nullcontext():
            for tensor in with_it:
                collectives.allreduce(tensor, ReduceOp.SUM, stream)
            for flat in self.flats:
                if self._share is None:
                    collectives.allreduce(flat.wire, ReduceOp.SUM, stream)
                else:
                    collectives.reduce_scatter(flat.wire, flat.result, flat.counts(), ReduceOp.SUM, stream)
        for flat in self.flats:
            if self._rules.average:  # the pass that casts a compressed sum back divides it too
                source = flat.wire if flat.wire is not flat.memory else flat.result
                self._device.scale_by_ratio(source, flat.numerator, weight, flat.scale, flat.result)
            elif flat.wire is not flat.memory:
                self._device.copy(flat.wire, flat.memory)


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
