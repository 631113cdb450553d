"""`SlicedEmbedding`: an embedding whose rows are dealt out to the ranks of a mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from hvdlite_torch.slicing.linear import SlicedHead
from hvdlite_torch.slicing.results import own, plain_result, summed
from hvdlite_torch.slicing.whole import slice_parameter


class SlicedEmbedding(nn.Embedding):
    """Does what an `nn.Embedding` does. Its inputs and outputs are plain tensors, equal on all ranks of the mesh.

    Each rank looks up the numbers of its own rows, and the ranks add up what they have found. Models read the weight of an
    embedding by themselves (``F.linear(x, words.weight)``): they get the whole one.
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
        sliced, rows = self._sliced(), own(self._sliced())
        self._check(input)
        mesh = sliced.device_mesh
        first = mesh.get_local_rank() * -(
            -self.num_embeddings // mesh.size()
        )  # DTensor gives the last ranks fewer rows
        if not len(rows):
            found = rows.new_zeros(*input.shape, self.embedding_dim) + rows.sum()
        else:
            numbers = input - first
            elsewhere = (numbers < 0) | (numbers >= len(rows))
            padding = None if self.padding_idx is None else self.padding_idx - first
            if padding is not None and not 0 <= padding < len(rows):
                padding = None
            found = F.embedding(numbers.masked_fill(elsewhere, 0), rows, padding)
            found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return summed(found, sliced)

    def _check(self, numbers: torch.Tensor) -> None:
        outside = (numbers < 0) | (numbers >= self.num_embeddings)
        if numbers.device.type != "cpu":
            torch._assert_async(~outside.any())  # as torch's own kernel: without a wait
        elif outside.any():
            raise IndexError("index out of range in self")  # torch's own words

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sliced over {self._sliced().device_mesh.size()} ranks"


def slice_embeddings(layers: list[Any], mesh: DeviceMesh) -> None:
    """Deal out the rows of an embedding. It stays the same object and changes its class, so its hooks and attributes stay.

    Args:
        layers: The embedding; and the layers that have the same parameter as their weight, embeddings or `nn.Linear`.
        mesh: A mesh of one axis.
    """
    slice_parameter(layers[0], "weight", mesh, Shard(0))
    for layer in layers:
        layer._parameters["weight"] = layers[0]._parameters["weight"]
        layer.__class__ = SlicedEmbedding if isinstance(layer, nn.Embedding) else SlicedHead
