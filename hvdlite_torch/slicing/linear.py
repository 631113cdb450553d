"""Linear layers of which each rank of a mesh has columns, and those of which it has rows.

A layer by columns takes whole inputs and returns this rank's features. A layer by rows takes this rank's features and returns
whole results. Between the two nothing travels (Megatron-LM, arXiv:1909.08053). A layer stays the same object and changes its
class, so its name, hooks and attributes stay.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from hvdlite_torch.slicing.results import entering, own, summed
from hvdlite_torch.slicing.whole import slice_parameter


class SlicedColumns(nn.Linear):
    """An `nn.Linear` with this rank's share of the output features."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return this rank's features, of shape (..., out_features / ranks)."""
        return F.linear(entering(input, self.weight), own(self.weight), own(self.bias))


class SlicedRows(nn.Linear):
    """An `nn.Linear` with this rank's share of the input features."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the whole result from this rank's features, of shape (..., in_features / ranks)."""
        result = summed(F.linear(input, own(self.weight)), self.weight)
        return result if self.bias is None else result + self.bias


def slice_columns(layer: nn.Linear, mesh: DeviceMesh) -> None:
    """Let a layer compute this rank's share of its output features."""
    for name in ("weight", "bias"):
        slice_parameter(layer, name, mesh, Shard(0))
    layer.__class__ = SlicedColumns


def slice_rows(layer: nn.Linear, mesh: DeviceMesh) -> None:
    """Let a layer take this rank's share of its input features. The bias stays whole, for it is added to the sum."""
    slice_parameter(layer, "weight", mesh, Shard(1))
    layer.__class__ = SlicedRows
