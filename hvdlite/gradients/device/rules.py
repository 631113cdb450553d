"""How gradients are scaled, cast and cut into shares: the same for all buckets, on all ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

from hvdlite.errors import ArgumentError
from hvdlite.protocols import ReduceOp
from hvdlite.tensors.compression import CastCompressor
from hvdlite.tensors.numpy_adapter import HALF_DTYPES


class Rules(NamedTuple):
    """What is the same for all buckets of a reducer.

    Attributes:
        average: Divide by the sum of the weights.
        cast: The dtype in which float32 gradients travel; empty if they are not cast.
        divisor: What is cast is divided by it before, and multiplied by it afterwards.
        parts: Shares that each bucket is cut into, one for each rank, which gets no other of the result; None if all get all.
        whole: Shares are never cut within a tensor.
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
        """The dtype in which gradients of a dtype travel. Of others than float32 a cast would lose more than was asked for."""
        return self.cast if self.cast and dtype == "float32" else dtype

    def factor(self, dtype: str, size: int) -> float:
        """By what gradients of a dtype are multiplied before `size` ranks add them, beside the weight of their rank."""
        if not self.average:
            return 1.0
        wire = self.wire_of(dtype)
        divisor = 1.0 if wire == dtype else self.divisor
        # Sums of halves leave their range sooner than averages do.
        return 1.0 / divisor / (size if wire in HALF_DTYPES else 1)


def cast_of(compressor: Any) -> str:
    """The dtype to which a compressor casts float32 gradients on their way.

    Raises:
        ArgumentError: The compressor does something else.
    """
    kind = compressor if isinstance(compressor, type) else type(compressor)
    if not issubclass(kind, CastCompressor):
        raise ArgumentError(
            f"compression={compressor!r}: gradients on a GPU are compressed by casts only, as Compression.fp16 and "
            "Compression.bf16 do it (or a subclass of CastCompressor with another DTYPE)."
        )
    dtype: str = kind.DTYPE
    return dtype
