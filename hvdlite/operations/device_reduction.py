"""Reductions on a GPU: tensors of one dtype as one flat tensor, scaled, reduced and given back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdlite.gpu.collectives import DeviceCollectives
from hvdlite.protocols import ReduceOp
from hvdlite.tensors.reduction import Reduction


class DevicePiece(NamedTuple):
    """One tensor of a reduction.

    Attributes:
        native: Of the device; None where this rank has joined and adds nothing.
        shape: Its shape.
        inplace: The result overwrites it.
    """

    native: Any
    shape: tuple[int, ...]
    inplace: bool


class DeviceReduction:
    """One flat reduction. Its memory is found when it is made; what it does then cannot fail for want of any.

    A single tensor that lies side by side is reduced from where it is to where the result goes, without a copy.

    Args:
        pieces: Of one dtype.
        how: What is done with the values; `Reduction.on_device` has a dtype for them. Halves are multiplied as float32 and
            rounded, each time.
        channel: The ranks.
        counts: For each rank the elements that it gets, of one piece (`reduce_scatter`); None for all (`allreduce`).
    """

    def __init__(
        self,
        pieces: Sequence[DevicePiece],
        how: Reduction,
        channel: DeviceCollectives,
        counts: Sequence[int] | None = None,
    ) -> None:
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
        """Do it. Returns for each piece a new tensor, or the piece itself if in place; None where this rank adds nothing."""
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
        """Do it. Returns this rank's elements of the result, flat."""
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
        """Averages of integers are divided here, in the wide dtype."""
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
