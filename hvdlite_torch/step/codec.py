"""What gradients become before they are exchanged, and afterwards."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite.protocols import TensorInfo
from hvdlite.tensors.compression import Compression, Compressor, encoded_info


class Codec:
    """What gradients become before they are exchanged, and afterwards.

    Args:
        compressor: Makes them smaller.
        divisor: Gradients are divided by it before they are compressed, and multiplied by it afterwards, so that sums stay
            within the range of a small dtype.

    Attributes:
        compressor, divisor: As given.
        name: That of the compressor, for messages.
        repeatable: Compressing a gradient twice gives the same, and changes nothing else.
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
        """The dtype and shape of what travels for gradients like `info`; None if the compressor cannot say it."""
        return encoded_info(self.compressor, info)

    def encode(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A gradient as it is exchanged, and what `decode` needs."""
        encoded, context = self.compressor.compress(gradient if self.divisor == 1.0 else gradient / self.divisor)
        return encoded, context

    def decode(self, result: torch.Tensor, context: Any) -> torch.Tensor:
        """A combined gradient as the optimizer wants it."""
        decoded: torch.Tensor = self.compressor.decompress(result, context)
        return decoded if self.divisor == 1.0 else decoded * self.divisor
