"""Smaller numbers on the wire: tensors are compressed before they are exchanged, and what comes back is decompressed.

A compressor is a class (or an object) with two methods, so that a program can bring its own. It may have a third,
`encoded`: see `SizedCompressor`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, TypeVar

from hvdlite.protocols import TensorInfo
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


class SizedCompressor(Compressor, Protocol):
    """A compressor that says beforehand how large it makes tensors.

    The gradients of an optimizer are exchanged in memory that all ranks make beforehand. So if `encoded` is there, no rank need
    have had a gradient of a parameter before another one has. `decompress` then gets None for its context on a rank that has
    not compressed a gradient of the parameter yet.
    """

    def encoded(self, info: TensorInfo) -> TensorInfo:
        """The dtype and shape of what `compress` makes of a tensor like `info`."""
        ...


def encoded_info(compressor: Compressor, info: TensorInfo) -> TensorInfo | None:
    """What a compressor makes of a tensor like `info`; None if it does not say that."""
    # Of a class that is derived, and compresses in another way, an inherited `encoded` says nothing.
    lineage = (compressor if isinstance(compressor, type) else type(compressor)).__mro__
    for where in (getattr(compressor, "__dict__", {}), *map(vars, lineage)):
        if "encoded" in where:
            said: TensorInfo = compressor.encoded(info)  # type: ignore[attr-defined]
            return TensorInfo(said[0], tuple(said[1]))
        if "compress" in where:
            return None
    return None


class NoneCompressor:
    """Leaves tensors as they are."""

    @classmethod
    def encoded(cls, info: TensorInfo) -> TensorInfo:
        """`info`."""
        return info

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
        smaller = cls._dtype_for(dtype)
        return (tensor if smaller == dtype else adapter.cast(tensor, smaller)), dtype

    @classmethod
    def encoded(cls, info: TensorInfo) -> TensorInfo:
        """`info` with the dtype that `compress` casts to."""
        return info._replace(dtype=cls._dtype_for(info.dtype))

    @classmethod
    def _dtype_for(cls, dtype: str) -> str:
        return cls.DTYPE if dtype.startswith("float") and dtype not in HALF_DTYPES else dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: str | None) -> Any:
        """`tensor` in the dtype `ctx`; as it is if that is None."""
        adapter = adapter_for(tensor)
        return tensor if ctx is None or adapter.dtype(tensor) == ctx else adapter.cast(tensor, ctx)


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
