"""Compressors: they make a tensor smaller before it is exchanged, and decompress the result.

A compressor is a class or an object with two methods, so a program can bring its own. It may have a third method, `encoded`:
see `SizedCompressor`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, TypeVar

from hvdlite.protocols import TensorInfo
from hvdlite.tensors.numpy_adapter import HALF_DTYPES
from hvdlite.tensors.registry import adapter_for

T = TypeVar("T")


class Compressor(Protocol):
    """A compressor of tensors: an object, or a class with static or class methods."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Make a tensor smaller.

        Returns:
            The tensor to exchange, whose shape and dtype are the same on all ranks, and a context for `decompress`.
        """
        ...

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Return the result of an exchange in the form that it would have without compression.

        Args:
            tensor: The result of the exchange of compressed tensors.
            ctx: The context that `compress` has returned on this rank.
        """
        ...


class SizedCompressor(Compressor, Protocol):
    """A compressor that says beforehand how large a compressed tensor is.

    The gradients of an optimizer are exchanged in memory that all ranks allocate beforehand. With `encoded`, a rank can
    allocate the memory for a parameter before it has had a gradient of it. A rank that has compressed no gradient of the
    parameter yet passes None to `decompress` as the context.
    """

    def encoded(self, info: TensorInfo) -> TensorInfo:
        """Return the dtype and shape that `compress` gives to a tensor of dtype and shape `info`."""
        ...


def encoded_info(compressor: Compressor, info: TensorInfo) -> TensorInfo | None:
    """Return the dtype and shape that `compressor` gives to a tensor like `info`; None if it does not say so."""
    # If a derived class has another `compress`, then an inherited `encoded` says nothing about it.
    lineage = (compressor if isinstance(compressor, type) else type(compressor)).__mro__
    for where in (getattr(compressor, "__dict__", {}), *map(vars, lineage)):
        if "encoded" in where:
            said: TensorInfo = compressor.encoded(info)  # type: ignore[attr-defined]
            return TensorInfo(said[0], tuple(said[1]))
        if "compress" in where:
            return None
    return None


class NoneCompressor:
    """The compressor that leaves tensors unchanged."""

    @classmethod
    def encoded(cls, info: TensorInfo) -> TensorInfo:
        """Return `info`."""
        return info

    @classmethod
    def compress(cls, tensor: T) -> tuple[T, None]:
        """Return `tensor` and None."""
        return tensor, None

    @classmethod
    def decompress(cls, tensor: T, ctx: Any) -> T:
        """Return `tensor`."""
        return tensor


class CastCompressor:
    """A compressor that casts float32 and float64 tensors to a 16-bit dtype. It leaves all other dtypes unchanged.

    The sum is accumulated in float32 and rounded once. So precision is lost twice: when a rank casts its values, and when the
    result is rounded. The casts are differentiable if the casts of the framework are.
    """

    DTYPE: ClassVar[str]
    """The name of the dtype that is sent."""

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, str]:
        """Return `tensor` cast to `DTYPE`, and the name of its original dtype."""
        adapter = adapter_for(tensor)
        dtype = adapter.dtype(tensor)
        smaller = cls._dtype_for(dtype)
        return (tensor if smaller == dtype else adapter.cast(tensor, smaller)), dtype

    @classmethod
    def encoded(cls, info: TensorInfo) -> TensorInfo:
        """Return `info` with the dtype to which `compress` casts."""
        return info._replace(dtype=cls._dtype_for(info.dtype))

    @classmethod
    def _dtype_for(cls, dtype: str) -> str:
        return cls.DTYPE if dtype.startswith("float") and dtype not in HALF_DTYPES else dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: str | None) -> Any:
        """Return `tensor` cast to the dtype `ctx`, or unchanged if `ctx` is None."""
        adapter = adapter_for(tensor)
        return tensor if ctx is None or adapter.dtype(tensor) == ctx else adapter.cast(tensor, ctx)


class FP16Compressor(CastCompressor):
    """The compressor that casts to float16: it has 11 bits of precision, and values beyond 65504 become infinite."""

    DTYPE = "float16"


class BF16Compressor(CastCompressor):
    """The compressor that casts to bfloat16: it has the range of float32, and 8 bits of precision."""

    DTYPE = "bfloat16"


class Compression:
    """The compressors that hvdlite has."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
