"""How gradients are scaled, cast and cut into shares: the same for all buckets, on all ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

from hvdlite.errors import ArgumentError
from hvdlite.protocols import ReduceOp
from hvdlite.tensors.compression import CastCompressor
from hvdlite.tensors.numpy_adapter import HALF_DTYPES
from hvdlite.tensors.reduction import fitting_factor


class Rules(NamedTuple):
    """What is the same for all buckets of a reducer.

    Attributes:
        average: Whether sums are divided by the sum of the weights.
        cast: The dtype in which float32 gradients travel; empty if they are not cast.
        divisor: Gradients that are cast are divided by this number before, and multiplied by it afterwards.
        parts: The number of shares of each bucket, one for each rank, which gets only this share of the result; None if all
            ranks get the whole result.
        whole: Whether a tensor is never cut between shares.
    """

    average: bool
    cast: str = ""
    divisor: float = 1.0
    parts: int | None = None
    whole: bool = False

    @property
    def op(self) -> ReduceOp:
        """AVERAGE or SUM."""
        return ReduceOp.AVERAGE if self.average else ReduceOp.SUM

    def wire_of(self, dtype: str) -> str:
        """Return the dtype in which gradients of `dtype` travel. Only float32 is cast; other dtypes would lose too much."""
        return self.cast if self.cast and dtype == "float32" else dtype

    def factor(self, dtype: str, size: int) -> float:
        """Return the factor, besides the weight, that scales gradients of `dtype` before `size` ranks add them."""
        if not self.average:
            return 1.0
        wire = self.wire_of(dtype)
        divisor = 1.0 if wire == dtype else self.divisor
        # Sums overflow the range of half precision sooner than averages do. A power of two rounds nothing.
        return 1.0 / divisor * (fitting_factor(size) if wire in HALF_DTYPES else 1.0)


def cast_of(compressor: Any) -> str:
    """Return the dtype to which a compressor casts float32 gradients before they travel.

    Raises:
        ArgumentError: The compressor is not a CastCompressor.
    """
    kind = compressor if isinstance(compressor, type) else type(compressor)
    if not issubclass(kind, CastCompressor):
        raise ArgumentError(
            f"compression={compressor!r}: gradients on a GPU are compressed by casts only, as Compression.fp16 and "
            "Compression.bf16 do it (or a subclass of CastCompressor with another DTYPE)."
        )
    dtype: str = kind.DTYPE
    return dtype
