"""Linear layers of which each rank of a mesh has columns, and those of which it has rows.

A layer by columns takes whole inputs and returns this rank's features. A layer by rows takes this rank's features and returns
whole results. Between the two nothing travels (Megatron-LM, arXiv:1909.08053). A layer stays the same object and changes its
class, so its name, hooks and attributes stay. The layers are `nn.Linear`, and ``Conv1D`` of Hugging Face's transformers, which
has its weight the other way round.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional as F

from hvdlite_torch.slicing.results import entering, own, plain_result, summed
from hvdlite_torch.slicing.whole import slice_parameter


class _Columns:
    """A linear layer with this rank's share of the output features."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        """Return this rank's features, of shape (..., features / ranks)."""
        return F.linear(entering(input, self.weight), _matrix(self), own(self.bias))


class _Rows:
    """A linear layer with this rank's share of the input features."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        """Return the whole result from this rank's features, of shape (..., features / ranks)."""
        result = summed(F.linear(input, _matrix(self)), self.weight)
        return result if self.bias is None else result + self.bias


class SlicedColumns(_Columns, nn.Linear):
    pass


class SlicedRows(_Rows, nn.Linear):
    pass


class SlicedHead(nn.Linear):
    """An `nn.Linear` whose output features are dealt out and gathered. It shares its weight with an embedding."""

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The whole weight, gathered from all ranks. Gradients go back to the slices."""
        return plain_result(self._parameters["weight"])  # type: ignore[arg-type]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """See `nn.Linear.forward`."""
        sliced: Any = self._parameters["weight"]
        features = F.linear(entering(input, sliced), own(sliced))
        shape = torch.Size((*features.shape[:-1], self.out_features))
        stride = torch.empty(shape, device="meta").stride()
        placements = [Shard(features.dim() - 1)]
        result = plain_result(
            DTensor.from_local(
                features, sliced.device_mesh, placements, run_check=False, shape=shape, stride=tuple(stride)
            )
        )
        return result if self.bias is None else result + self.bias


def conv1d() -> Any:
    """Return the class ``Conv1D`` of transformers, or None if no model can have it."""
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


def features(layer: Any) -> tuple[int, int]:
    """Return the numbers of input and output features."""
    return (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else (layer.nx, layer.nf)


def slice_columns(layer: Any, mesh: DeviceMesh, parts: int = 1) -> None:
    """Let a layer compute this rank's share of its output features.

    Args:
        layer: The layer.
        mesh: A mesh of one axis.
        parts: In how many parts of equal size the output is, such as queries, keys and values: each rank has a share of each.
    """
    for name, dimension in (("weight", 0 if isinstance(layer, nn.Linear) else 1), ("bias", 0)):
        placement = Shard(dimension) if parts == 1 else _StridedShard(dimension, split_factor=parts)
        slice_parameter(layer, name, mesh, placement)
    layer.__class__ = SlicedColumns if isinstance(layer, nn.Linear) else _of_conv1d(_Columns)


def slice_rows(layer: Any, mesh: DeviceMesh) -> None:
    """Let a layer take this rank's share of its input features. The bias stays whole, for it is added to the sum."""
    slice_parameter(layer, "weight", mesh, Shard(1 if isinstance(layer, nn.Linear) else 0))
    layer.__class__ = SlicedRows if isinstance(layer, nn.Linear) else _of_conv1d(_Rows)


def _matrix(layer: Any) -> torch.Tensor:
    """Return this rank's slice of the weight, of shape (output features, input features)."""
    matrix: torch.Tensor = own(layer.weight)
    return matrix if isinstance(layer, nn.Linear) else matrix.t()


@functools.cache
def _of_conv1d(kind: type) -> Any:
    return type(f"SlicedConv1D{kind.__name__}", (kind, conv1d()), {})
