"""Reductions on a GPU: tensors of one dtype are packed into one flat tensor, scaled, reduced, and unpacked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from hvdlite.comm.gpu.collectives import DeviceCollectives
from hvdlite.protocols import ReduceOp
from hvdlite.tensors.numpy_adapter import HALF_DTYPES
from hvdlite.tensors.reduction import Reduction, fitting_factor

_NARROW = {*HALF_DTYPES, "float8_e4m3fn", "float8_e5m2"}


class DevicePiece(NamedTuple):
    """One tensor of a reduction.

    Attributes:
        native: The tensor of the device; None if this rank has joined and adds no values.
        shape: The shape of the tensor.
        inplace: True if the result overwrites the tensor.
    """

    native: Any
    shape: tuple[int, ...]
    inplace: bool


class DeviceReduction:
    """One flat reduction. The constructor allocates all memory, so the methods cannot fail for want of memory.

    A single contiguous tensor is reduced straight into its result, without a copy.

    Args:
        pieces: Tensors of one dtype.
        how: The reduction. `Reduction.on_device` must name a dtype for it. Each multiplication of float16 or bfloat16 values is
            done in float32 and rounded.
        channel: The device collectives of the group.
        counts: For `reduce_scatter`, the number of elements of the single piece that each rank gets; None for `allreduce`.
    """

    def __init__(
        self,
        pieces: Sequence[DevicePiece],
        how: Reduction,
        channel: DeviceCollectives,
        counts: Sequence[int] | None = None,
    ) -> None:
        how = _without_rounded_factor(how, channel.size)
        wire, dtype = how.on_device(channel.nccl_version), how.dtype
        assert wire is not None
        self._pieces, self._how, self._casts = pieces, how, how.casts_on_device
        self._channel, self._device, self._counts = channel, channel.device, counts
        device = self._device
        self._results = [self._result_of(piece) for piece in pieces]
        first = pieces[0]
        self._direct = (
            len(pieces) == 1
            and first.native is not None
            and not self._casts
            and device.is_plain(first.native)
            and (first.inplace or how.before == 1.0)
        )
        if self._direct:
            self._flat = device.flat(first.native)
        else:
            self._flat = device.empty([sum(math.prod(piece.shape) for piece in pieces)], dtype)
        self._work = device.empty([device.count(self._flat)], wire) if self._casts else self._flat
        self._kept: Any = None
        self._part: Any = None
        if counts is not None:
            self._kept = device.empty([counts[channel.rank]], dtype)
            self._part = device.empty([counts[channel.rank]], wire) if self._casts else self._kept

    def _result_of(self, piece: DevicePiece) -> Any:
        if piece.native is None or self._counts is not None:
            return None
        return piece.native if piece.inplace else self._device.empty(piece.shape, self._how.dtype)

    def allreduce(self) -> list[Any]:
        """Reduce, and return for each piece a new tensor, or the piece if it is in place; None for a piece without values."""
        device, stream = self._device, self._channel.stream
        self._load()
        if self._direct:
            out = device.flat(self._results[0])
            self._channel.allreduce(self._flat, self._how.op, stream, None if self._pieces[0].inplace else out)
            self._scale(out, self._how.after)
            return self._results
        self._channel.allreduce(self._work, self._op_there, stream)
        self._finish(self._work)
        if self._casts:
            device.copy(self._work, self._flat)
        self._scale(self._flat, self._how.after)
        if all(result is not None for result in self._results):
            device.unpack(self._flat, self._results)
        else:
            start = 0
            for piece, result in zip(self._pieces, self._results, strict=True):
                length = math.prod(piece.shape)
                if result is not None:
                    device.unpack(self._flat[start : start + length], [result])
                start += length
        return self._results

    def reduce_scatter(self) -> Any:
        """Reduce, and return this rank's elements of the result as a flat tensor."""
        assert self._counts is not None
        device, stream = self._device, self._channel.stream
        self._load()
        self._channel.reduce_scatter(self._work, self._part, self._counts, self._op_there, stream)
        self._finish(self._part)
        if self._casts:
            device.copy(self._part, self._kept)
        self._scale(self._kept, self._how.after)
        return self._kept

    @property
    def _op_there(self) -> ReduceOp:
        """Return the op for the device. An average of integers is a sum there; this class divides it, in the wide dtype."""
        return self._how.combining if self._casts else self._how.op

    def _finish(self, wide: Any) -> None:
        if self._casts and self._how.divide_by != 1:
            self._device.divide(wide, self._how.divide_by)

    def _load(self) -> None:
        device = self._device
        if not self._direct:
            natives = [piece.native for piece in self._pieces]
            if all(native is not None for native in natives):
                device.pack(natives, self._flat)
            else:
                self._pack_with_nothing()
        self._scale(self._flat, self._how.before)
        if self._casts:
            device.copy(self._flat, self._work)

    def _pack_with_nothing(self) -> None:
        start = 0
        for piece in self._pieces:
            length = math.prod(piece.shape)
            where = self._flat[start : start + length]
            start += length
            if piece.native is not None:
                self._device.pack([piece.native], where)
            elif self._how.dtype.startswith(("int", "uint")):
                self._device.from_host(np.full(length, self._how.neutral(), self._how.storage), where)
            else:
                self._device.fill(where, self._how.neutral())

    def _scale(self, flat: Any, factor: float) -> None:
        if factor != 1.0:
            self._device.scale(flat, factor)


def _without_rounded_factor(how: Reduction, size: int) -> Reduction:
    """Return a reduction with the same result for `size` ranks that lets NCCL add up, where NCCL would average with a bias.

    NCCL multiplies values of 16 and 8 bits by 1/n, which it rounds to their dtype first: that is 2e-3 too much for n = 3 and
    bfloat16. So each rank scales its values by a power of two, which keeps the sum in range, and the sum by the rest.
    """
    if how.op is not ReduceOp.AVERAGE or how.dtype not in _NARROW or size & (size - 1) == 0:
        return how
    shift = fitting_factor(size)
    return replace(how, op=ReduceOp.SUM, before=how.before * shift, after=how.after / (shift * size), divide_by=1)
