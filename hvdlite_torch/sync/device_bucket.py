"""Gradients in flat tensors on a device, and their exchange: what is put on streams, without the host looking at a value.

A bucket holds the gradients of some parameters, one flat tensor for each dtype, and a small tail that is summed with them::

    ├─ gradient 0 ─┼─ gradient 1 ─┼ … ┤     tail: ├ used? of each ┼ weight ┼ lost ┼ joined ┼ state ┤

The tail says what the headers say in host memory (`hvdlite.gradients.bucket`), but nobody has to read it: the sum of the
gradients is divided by the sum of the weights on the device. Only a rank that cannot know the answer by itself reads it, and
waits for it then (`Tail`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hvdlite.errors import ArgumentError
from hvdlite.gpu.collectives import DeviceCollectives
from hvdlite.gradients.header import state_words
from hvdlite.gradients.layout import Block, Piece, lay_out, pieces, with_equal_parts
from hvdlite.protocols import ReduceOp, Stream, TensorInfo
from hvdlite.tensors.compression import CastCompressor
from hvdlite.tensors.numpy_adapter import HALF_DTYPES
from hvdlite_torch.step.codec import Codec
from hvdlite_torch.tensors.device import TORCH
from hvdlite_torch.tensors.ownership import uses_of_storage

FIRST_BYTES = 2**20
"""Of the first bucket: it is to be on its way early. As torch's DistributedDataParallel has it."""

_EXTRA = 7
_WEIGHT, _STATE = -_EXTRA, -4


class DeviceHeader(NamedTuple):
    """What a rank says to the others with its gradients.

    Attributes:
        used: For each tensor of the bucket, whether this rank has a gradient of it.
        weight: Its share in an average.
        joined: It has run out of data.
        lost: Gradients that it has sent already have changed since.
        state: A digest of what must be the same on all ranks (`hvdlite.gradients.header.digest`).
    """

    used: tuple[bool, ...]
    weight: float = 1.0
    joined: bool = False
    lost: bool = False
    state: int = 0


class DeviceHeaderSum(NamedTuple):
    """A tail in host memory.

    Attributes:
        anywhere: For each tensor of the bucket, whether any rank has a gradient of it.
        weight: The sum of the weights.
        joined: The number of ranks that have run out of data.
        lost: Some rank's gradients have changed after they were sent.
    """

    anywhere: list[bool]
    weight: float
    joined: int
    lost: bool

    @classmethod
    def of(cls, tail: Sequence[float]) -> DeviceHeaderSum:
        """Read a tail."""
        *sums, weight, lost, joined, _, _, _, _ = tail
        return cls([each > 0 for each in sums], weight, round(joined), lost > 0)


class Rules(NamedTuple):
    """What is the same for all buckets of an optimizer.

    Attributes:
        average: Divide by the sum of the weights.
        codec: How gradients are compressed; None if they are not.
        parts: Shares that each bucket is cut into, one for each rank, which gets no other of the result; None if all get all.
        whole: Shares are never cut within a tensor.
    """

    average: bool
    codec: Codec | None = None
    parts: int | None = None
    whole: bool = False

    @property
    def summary(self) -> tuple[object, ...]:
        """All of it by value: the same on all ranks."""
        codec = None if self.codec is None else (cast_of(self.codec), self.codec.divisor)
        return self.average, codec, self.parts, self.whole

    def wire_of(self, dtype: str) -> str:
        """The dtype in which gradients of a dtype travel. Of others than float32 a cast would lose more than was asked for."""
        return cast_of(self.codec) if self.codec is not None and dtype == "float32" else dtype

    def factor(self, dtype: str, wire: str, size: int) -> float:
        """By what gradients are multiplied before they are added, beside the weight of their rank."""
        if not self.average:
            return 1.0
        divisor = 1.0 if self.codec is None or wire == dtype else self.codec.divisor
        # Sums of halves leave their range sooner than averages do.
        return 1.0 / divisor / (size if wire in HALF_DTYPES else 1)


class Flat:
    """The gradients of one dtype.

    Args:
        block: Where each of them lies.
        parameters: All parameters, by the numbers in `block`.
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
        views: Of each parameter, in its shape; and in the order of its memory, if not sharded.
    """

    def __init__(
        self,
        block: Block,
        parameters: Sequence[torch.Tensor],
        device: torch.device,
        share: int | None,
        wire: str,
        factor: float,
    ) -> None:
        self.block, self.factor = block, factor
        dtype = TORCH[block.dtype]
        self.memory = torch.zeros(block.length, dtype=dtype, device=device)
        self.wire = self.memory
        if wire != block.dtype:
            self.wire = torch.zeros(block.length, dtype=TORCH[wire], device=device)
        self.result = self.memory
        if share is not None:
            self.result = torch.zeros(block.bounds[share + 1] - block.bounds[share], dtype=dtype, device=device)
        self.numerator = torch.tensor(1 / factor, dtype=torch.float64, device=device)
        self.scale = torch.empty((), dtype=dtype.to_real(), device=device)
        pieces = {index: self.memory[span.start : span.stop] for index, span in block.spans.items()}
        self.views = {
            index: view_like(piece, parameters[index]) if share is None else piece.view(parameters[index].shape)
            for index, piece in pieces.items()
        }
        self._own_uses = uses_of_storage(self.memory)

    def is_held(self, at_home: int) -> bool:
        """Whether the program holds some of the memory, beside so many gradients that are where they are expected."""
        return uses_of_storage(self.memory) > self._own_uses + at_home

    def renew(self) -> None:
        """Leave the memory to the program, and take other memory."""
        old = self.memory
        self.memory = torch.zeros_like(old)
        self.wire = self.memory if self.wire is old else self.wire
        self.result = self.memory if self.result is old else self.result
        self.views = {
            index: self.memory.as_strided(view.shape, view.stride(), view.storage_offset())
            for index, view in self.views.items()
        }

    def counts(self) -> list[int]:
        """The lengths of the parts."""
        bounds = self.block.bounds
        return [stop - start for start, stop in itertools.pairwise(bounds)]


class DeviceBucket:
    """Gradients that are exchanged together. All ranks make one, with equal arguments.

    Args:
        infos: Dtype and shape of each gradient of the model.
        parameters: All of the model.
        tensors: The numbers of those in this bucket.
        place: Where.
        collectives: Whose ranks take part.
        rules: How.

    Attributes:
        tensors, collectives: As given.
        flats: Their memory.
        views: Where each gradient is expected, and where the combined one is afterwards.
        tail: See the module; shape ``(len(tensors) + 7,)``, float64.

    Raises:
        torch.OutOfMemoryError: There is no room for it.
    """

    def __init__(
        self,
        infos: Sequence[TensorInfo],
        parameters: Sequence[torch.Tensor],
        tensors: Sequence[int],
        place: torch.device,
        collectives: DeviceCollectives,
        rules: Rules,
    ) -> None:
        self.tensors = tuple(tensors)
        self.collectives = collectives
        self._rules = rules
        self._share = None if rules.parts is None else collectives.rank
        blocks = lay_out(infos, rules.parts or 1, rules.whole, self.tensors)
        if not rules.whole:
            blocks = [with_equal_parts(block) for block in blocks]
        self.flats = []
        for block in blocks:
            wire = rules.wire_of(block.dtype)
            factor = rules.factor(block.dtype, wire, collectives.size)
            self.flats.append(Flat(block, parameters, place, self._share, wire, factor))
        self.views = {index: view for flat in self.flats for index, view in flat.views.items()}
        self.tail = torch.zeros(len(self.tensors) + _EXTRA, dtype=torch.float64, device=place)
        self._weight = self.tail[_WEIGHT]
        self._all_used = (True,) * len(self.tensors)
        self._usual = self._template(DeviceHeader(self._all_used))
        self._usual_state = 0

    def is_home(self, index: int, gradient: torch.Tensor | None) -> bool:
        """Whether a gradient is where the bucket expects it: whatever a program has done to the tensor object."""
        view = self.views[index]
        return (
            gradient is not None
            and gradient.layout is torch.strided
            and gradient.data_ptr() == view.data_ptr()
            and gradient.shape == view.shape
            and gradient.stride() == view.stride()
            and gradient.dtype is view.dtype
            and not (gradient.is_neg() or gradient.is_conj())
        )

    def lend(self, index: int) -> torch.Tensor:
        """The gradient for the program: a tensor object of its own, of which changes count as new versions."""
        return self.views[index].detach()

    def leave_what_is_held(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Take other memory where the program still holds what it was given, apart from what is in ``p.grad`` now.

        Args:
            gradients: In the order of `tensors`.

        Returns:
            New memory.
        """
        home = {index for index, each in zip(self.tensors, gradients, strict=True) if self.is_home(index, each)}
        renewed = []
        for flat in self.flats:
            if flat.is_held(len(home.intersection(flat.views))):
                flat.renew()
                self.views.update(flat.views)
                renewed.append(flat.memory)
        return renewed

    def memory(self) -> list[torch.Tensor]:
        """All that the communication stream works on."""
        found = [self.tail]
        for flat in self.flats:
            found += [flat.memory, flat.wire, flat.result, flat.numerator, flat.scale]
        return found

    def pieces(self) -> list[tuple[Piece, torch.Tensor]]:
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
        """Change when somebody writes into the memory by torch's operations."""
        return tuple([flat.memory._version for flat in self.flats])

    def pack(self, gradients: Sequence[torch.Tensor | None], weight: float) -> None:
        """Put this rank's gradients where they are expected, on the current stream.

        Args:
            gradients: In the order of `tensors`: like the parameters; None counts as zeros. One that is the view already
                stays.
            weight: This rank's; with 0 gradients may be anything, and count as zeros.
        """
        if weight == 0:
            for flat in self.flats:
                flat.memory.zero_()
            return
        views, sources, unused = [], [], []
        for index, gradient in zip(self.tensors, gradients, strict=True):
            view = self.views[index]
            if gradient is None:
                unused.append(view)
            elif not self.is_home(index, gradient):
                views.append(view)
                sources.append(gradient)
        if views:
            torch._foreach_copy_(views, sources)
        if unused:
            torch._foreach_zero_(unused)

    def say(self, said: DeviceHeader) -> None:
        """Write the tail, on the current stream."""
        if said.used == self._all_used and not said.joined and not said.lost:
            if said.state != self._usual_state:
                self._usual_state = said.state
                for word, value in zip(self._usual[_STATE:], state_words(said.state), strict=True):
                    word.fill_(value)  # no copy from the host, which might wait
            self.tail.copy_(self._usual)
            if said.weight != 1.0:
                self._weight.fill_(said.weight)
        else:
            self.tail.copy_(self._template(said))

    def scale_before(self, weight: float) -> None:
        """Multiply by this rank's weight, and make what travels; on the current stream."""
        for flat in self.flats:
            factor = weight * flat.factor
            if flat.wire is not flat.memory:
                torch.mul(flat.memory, factor, out=flat.wire)
            elif factor != 1.0:
                flat.memory.mul_(factor)

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
                flat.memory.copy_(flat.wire)
            if self._rules.average:
                torch.div(flat.numerator, self._weight, out=flat.scale)
                flat.result.mul_(flat.scale)

    def _template(self, said: DeviceHeader) -> torch.Tensor:
        words = said.weight, said.lost, said.joined, *state_words(said.state)
        return torch.tensor([*said.used, *words], dtype=torch.float64).to(self.tail.device)


def cast_of(codec: Codec) -> str:
    """The dtype to which float32 gradients are cast on their way.

    Raises:
        ArgumentError: The compressor does something else.
    """
    compressor: Any = codec.compressor
    kind = compressor if isinstance(compressor, type) else type(compressor)
    if not issubclass(kind, CastCompressor):
        raise ArgumentError(
            f"compression={compressor!r}: gradients on a GPU are compressed by casts only, as Compression.fp16 and "
            "Compression.bf16 do it (or a subclass of CastCompressor with another DTYPE)."
        )
    dtype: str = kind.DTYPE
    return dtype


def view_like(memory: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Flat memory in the shape of a parameter, and in the order of its memory if that has no gaps (``channels_last``)."""
    return memory.as_strided(parameter.shape, order_of(parameter), memory.storage_offset())


def order_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """What `view_like` depends on beside the shape; ranks must agree on it."""
    return torch.empty_like(parameter, device="meta").stride()
