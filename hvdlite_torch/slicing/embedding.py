"""`SlicedEmbedding`: an embedding whose rows or columns are dealt out to the ranks of a mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from hvdlite_torch.slicing.results import plain_result
from hvdlite_torch.slicing.whole import slice_parameter


class SlicedEmbedding(nn.Embedding):
    """Does what an `nn.Embedding` does. Its inputs and outputs are plain tensors, equal on all ranks of the mesh.

    Models read the weight of an embedding by themselves (``F.linear(x, words.weight)``): they get the whole one.
    """

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The whole weight, of shape (num_embeddings, embedding_dim), gathered from all ranks. Gradients go back to the slices.

        All ranks of the mesh read it. The parameter itself, with this rank's slice, is in ``parameters()``.
        """
        return plain_result(self._sliced())

    def _sliced(self) -> Any:
        return self._parameters["weight"]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """See `nn.Embedding.forward`."""
        numbers = DTensor.from_local(input, self._sliced().device_mesh, [Replicate()], run_check=False)
        found: Any = F.embedding(numbers, self._sliced(), self.padding_idx)
        return plain_result(found)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sliced over {self._sliced().device_mesh.size()} ranks"


def slice_embedding(layer: nn.Embedding, mesh: DeviceMesh, axis: int) -> None:
    """Deal out an embedding. It stays the same object and changes its class, so its hooks and attributes stay.

    Args:
        layer: The embedding.
        mesh: A mesh of one axis. For columns its size divides their number.
        axis: 0 for slices of rows, 1 for slices of columns.
    """
    slice_parameter(layer, "weight", mesh, Shard(axis))
    layer.__class__ = SlicedEmbedding
