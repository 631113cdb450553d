"""`Codec` encodes gradients before they travel, and decodes the combined gradients."""

from __future__ import annotations

from typing import Any, TypeVar

from hvdlite.protocols import TensorInfo
from hvdlite.tensors.compression import Compression, Compressor, encoded_info

T = TypeVar("T")


class Codec:
    """Encodes the gradients of one optimizer before they travel, and decodes the combined gradients.

    Args:
        compressor: Makes gradients smaller.
        divisor: Gradients are divided by it before they are compressed, and multiplied by it afterwards, so that sums stay
            within the range of a small dtype.

    Attributes:
        compressor: Makes gradients smaller.
        divisor: The divisor of gradients.
        repeatable: Whether compressing a gradient twice gives the same result and has no other effect.
    """

    def __init__(self, compressor: Compressor, divisor: float) -> None:
        self.compressor = compressor
        self.divisor = divisor
        self.repeatable = compressor in (Compression.fp16, Compression.bf16)

    @property
    def name(self) -> str:
        compressor = self.compressor
        return compressor.__name__ if isinstance(compressor, type) else type(compressor).__name__

    def encoded(self, info: TensorInfo) -> TensorInfo | None:
        """Return the dtype and shape of the encoded form of gradients like `info`; None if the compressor cannot say it."""
        return encoded_info(self.compressor, info)

    def encode(self, gradient: T) -> tuple[T, Any]:
        """Return the encoded form of a gradient, which travels, and the context that `decode` needs."""
        given: Any = gradient
        encoded, context = self.compressor.compress(given if self.divisor == 1.0 else given / self.divisor)
        return encoded, context

    def decode(self, result: T, context: Any) -> T:
        """Return a combined gradient, decompressed."""
        decoded: Any = self.compressor.decompress(result, context)
        whole: T = decoded if self.divisor == 1.0 else decoded * self.divisor
        return whole
