"""Convolutions whose output channels are dealt out to the ranks of a mesh.

Each rank computes its channels from the whole input, and the channels are gathered. The gradient of the input is the sum of
what the ranks' channels give. A convolution stays the same object and changes its class, so its hooks and attributes stay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hvdlite_torch.slicing.results import entering, own, plain_result
from hvdlite_torch.slicing.whole import slice_parameter

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


class _Sliced:
    """Does what a convolution does. Its inputs and outputs are plain tensors, equal on all ranks of the mesh."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        """See the forward pass of the plain convolution."""
        y = self._conv_forward(entering(input, self.weight), own(self.weight), own(self.bias))
        channels = y.dim() - self.weight.dim() + 1
        return plain_result(
            DTensor.from_local(y.contiguous(), self.weight.device_mesh, [Shard(channels)], run_check=False)
        )

    def extra_repr(self: Any) -> str:
        return f"{super().extra_repr()}, sliced over {self.weight.device_mesh.size()} ranks"  # type: ignore[misc]


class SlicedConv1d(_Sliced, nn.Conv1d):
    pass


class SlicedConv2d(_Sliced, nn.Conv2d):
    pass


class SlicedConv3d(_Sliced, nn.Conv3d):
    pass


KINDS: dict[type[nn.Module], Any] = {nn.Conv1d: SlicedConv1d, nn.Conv2d: SlicedConv2d, nn.Conv3d: SlicedConv3d}
"""The classes that can be sliced, each with the class that it becomes."""


def slice_channels(layer: Convolution, mesh: DeviceMesh) -> None:
    """Deal out the output channels of a convolution, whose number the size of the mesh divides."""
    for name in ("weight", "bias"):
        slice_parameter(layer, name, mesh, Shard(0))
    layer.__class__ = KINDS[type(layer)]


def can_slice(plain: Convolution, ranks: int) -> str:
    """Return why a convolution cannot be sliced over so many ranks; an empty text if it can."""
    if plain.groups != 1:
        return f"{plain.groups} groups of channels"
    return (
        f"{plain.out_channels} output channels are not divisible by {ranks} ranks" if plain.out_channels % ranks else ""
    )
