"""The bytes of a message as torch's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite.async_sgd.deal import ServerLayout
from hvdlite.protocols import Array


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements of a tensor."""
    return tensor.numel() * tensor.element_size()


def view(data: Array, like: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, uint8, as a tensor with the dtype and shape of another one."""
    return torch.from_numpy(data).view(like.dtype).view(like.shape)


def views(data: Array, layout: ServerLayout, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors of a layout as views of the bytes of a message.

    Args:
        data: The message: uint8, shape ``(layout.nbytes,)``.
        layout: The places of the tensors.
        like: All tensors of the optimizer, for their dtypes and shapes.
    """
    places = zip(layout.tensors, layout.starts, strict=True)
    return [view(data[start : start + nbytes_of(like[number])], like[number]) for number, start in places]
