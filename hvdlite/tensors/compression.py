"""Compression: tensors are compressed before an exchange, and the results of the exchange are decompressed.

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
    """Compresses and decompresses tensors. It may be an object, or a class with static or class methods."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Make a tensor smaller.

        Returns:
            The tensor to exchange, whose shape and dtype are the same on all ranks, and the context that `decompress` needs.
        """
        ...

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Return the result of an exchange in the shape and dtype that it has without compression.

        Args:
            tensor: The result of the exchange of the compressed tensor.
            ctx: The context that `compress` returned.
        """
        ...


class SizedCompressor(Compressor, Protocol):
    """A compressor that says beforehand which dtype and shape it gives to a tensor.

    The gradients of an optimizer are exchanged in buffers that all ranks make beforehand. With `encoded`, a rank can make the
    buffer of a parameter before it has had a gradient of this parameter. On such a rank `decompress` gets None as its context.
    """

    def encoded(self, info: TensorInfo) -> TensorInfo:
        """Return the dtype and shape of the tensor that `compress` makes of a tensor like `info`."""
        ...


def encoded_info(compressor: Compressor, info: TensorInfo) -> TensorInfo | None:
    """Return the dtype and shape to which a compressor compresses a tensor like `info`; None if it does not say that."""
    # If a derived class overrides `compress` but not `encoded`, the inherited `encoded` does not describe it.
    lineage = (compressor if isinstance(compressor, type) else type(compressor)).__mro__
    for where in (getattr(compressor, "__dict__", {}), *map(vars, lineage)):
        if "encoded" in where:
            said: TensorInfo = compressor.encoded(info)  # type: ignore[attr-defined]
            return TensorInfo(said[0], tuple(said[1]))
        if "compress" in where:
            return None
    return None


class NoneCompressor:
    """A compressor that leaves tensors as they are."""

    @classmethod
    def encoded(cls, info: TensorInfo) -> TensorInfo:
        """Return `info`: the tensor stays as it is."""
        return info

    @classmethod
    def compress(cls, tensor: T) -> tuple[T, None]:
        """Return `tensor`, and None as the context."""
        return tensor, None

    @classmethod
    def decompress(cls, tensor: T, ctx: Any) -> T:
        """Return `tensor`."""
        return tensor


class CastCompressor:
    """A compressor that casts real floating-point tensors of 32 bits or more to 16 bits. All other tensors stay as they are.

    The ranks' values are accumulated as float32 and rounded once. So the loss is one rounding of each rank's values, and one of
    the result; and of gradients between hosts, one of each host's sum. The casts are differentiable if the framework's casts
    are.
    """

    DTYPE: ClassVar[str]
    """The name of the dtype in which tensors are exchanged."""

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, str]:
        """Return `tensor` as `DTYPE`, and the name of its dtype as the context."""
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
        is_wide = dtype.startswith("float") and not dtype.startswith("float8") and dtype not in HALF_DTYPES
        return cls.DTYPE if is_wide else dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: str | None) -> Any:
        """Return `tensor` cast to the dtype `ctx`, or unchanged if `ctx` is None."""
        adapter = adapter_for(tensor)
        return tensor if ctx is None or adapter.dtype(tensor) == ctx else adapter.cast(tensor, ctx)


class FP16Compressor(CastCompressor):
    """Compresses to float16, which has 11 bits of precision. Values beyond 65504 become infinite."""

    DTYPE = "float16"


class BF16Compressor(CastCompressor):
    """Compresses to bfloat16, which has the range of float32 and 8 bits of precision."""

    DTYPE = "bfloat16"


class Compression:
    """The names of hvdlite's compressors: `none`, `fp16` and `bf16`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
