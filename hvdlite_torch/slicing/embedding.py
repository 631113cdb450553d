"""`SlicedEmbedding`: an embedding whose rows or columns are dealt out to the ranks of a mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from hvdlite_torch.slicing.results import plain_result


class SlicedEmbedding(nn.Module):
    """Does what an `nn.Embedding` does. Its inputs and outputs are plain tensors, equal on all ranks of the mesh.

    Models read the weight of an embedding by themselves (``F.linear(x, words.weight)``): they get the whole one.

    Args:
        plain: The embedding whose weight is taken.
        mesh: A mesh of one axis. For columns its size divides their number.
        axis: 0 for slices of rows, 1 for slices of columns.
    """

    def __init__(self, plain: nn.Embedding, mesh: DeviceMesh, axis: int) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = plain.num_embeddings, plain.embedding_dim
        self.padding_idx = plain.padding_idx
        self._mesh = mesh
        sliced = distribute_tensor(plain.weight.detach(), mesh, [Shard(axis)])
        self._parameters["weight"] = nn.Parameter(sliced, plain.weight.requires_grad)
        self.train(plain.training)

    @property
    def weight(self) -> torch.Tensor:
        """The whole weight, of shape (num_embeddings, embedding_dim), gathered from all ranks. Gradients go back to the slices.

        All ranks of the mesh read it. The parameter itself, with this rank's slice, is in ``parameters()``.
        """
        return plain_result(self._sliced())

    def _sliced(self) -> Any:
        return self._parameters["weight"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `nn.Embedding.forward`."""
        numbers = DTensor.from_local(x, self._mesh, [Replicate()], run_check=False)
        found: Any = F.embedding(numbers, self._sliced(), self.padding_idx)
        return plain_result(found)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, sliced over {self._mesh.size()} ranks"
