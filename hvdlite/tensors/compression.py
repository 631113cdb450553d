"""Smaller numbers on the wire: tensors are compressed before they are exchanged, and what comes back is decompressed.

A compressor is a class (or an object) with two methods, so that a program can bring its own.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, TypeVar

from hvdlite.tensors.numpy_adapter import HALF_DTYPES
from hvdlite.tensors.registry import adapter_for

T = TypeVar("T")


class Compressor(Protocol):
    """How tensors are compressed. A class of static or class methods will do, an object too."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Make a tensor smaller.

        Returns:
            The tensor to be exchanged, of a shape and dtype that is the same on all ranks, and whatever `decompress` needs.
        """
        ...

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """The result of an exchange as it would be without compression; `ctx` is what `compress` returned."""
        ...


class NoneCompressor:
    """Leaves tensors as they are."""

    @classmethod
    def compress(cls, tensor: T) -> tuple[T, None]:
        """`tensor`, and nothing."""
        return tensor, None

    @classmethod
    def decompress(cls, tensor: T, ctx: Any) -> T:
        """`tensor`."""
        return tensor


class CastCompressor:
    """Sends floating-point tensors in a dtype of half their size or less; halves, integers and complex numbers as they are.

    The sum is accumulated as float32 and rounded once, so what is lost is the rounding of each rank's values and of the
    result. Casts are differentiable where the framework's are.
    """

    DTYPE: ClassVar[str]
    """The dtype on the wire."""

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, str]:
        """`tensor` as `DTYPE`, and the name of the dtype that it had."""
        adapter = adapter_for(tensor)
        dtype = adapter.dtype(tensor)
        smaller = dtype.startswith("float") and dtype not in HALF_DTYPES
        return (adapter.cast(tensor, cls.DTYPE) if smaller else tensor), dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: str) -> Any:
        """`tensor` in the dtype `ctx`."""
        adapter = adapter_for(tensor)
        return tensor if adapter.dtype(tensor) == ctx else adapter.cast(tensor, ctx)


class FP16Compressor(CastCompressor):
    """float16: 11 bits of precision; values beyond 65504 become infinite."""

    DTYPE = "float16"


class BF16Compressor(CastCompressor):
    """bfloat16: the range of float32 with 8 bits of precision."""

    DTYPE = "bfloat16"


class Compression:
    """The compressors that hvdlite has."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
