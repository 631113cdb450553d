"""`SlicedAttention`: an `nn.MultiheadAttention` whose heads are dealt out to the ranks of a mesh.

Each rank projects the inputs to the queries, keys and values of its own heads (columns of the weights), attends with these, and
multiplies with its rows of the output projection. The sum over the ranks is the output: one all-reduce in the forward pass, one
in the backward pass (Megatron-LM, arXiv:1909.08053).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional as F

from hvdlite.errors import ArgumentError
from hvdlite_torch.slicing.results import entering, own, plain_result, summed
from hvdlite_torch.slicing.whole import altered, slice_parameter


class SlicedAttention(nn.MultiheadAttention):
    """Does what an `nn.MultiheadAttention` does. Its inputs and outputs are plain tensors, equal on all ranks of the mesh.

    Each rank has its heads' rows of the three parts of ``in_proj_weight``, for queries, keys and values.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `nn.MultiheadAttention.forward`."""
        if is_causal and attn_mask is None:
            raise ArgumentError("is_causal=True needs attn_mask too, as for nn.MultiheadAttention.")
        # A tensor that is query, key and value enters once, so that its gradient is summed over the ranks once.
        entered = {id(each): entering(each, self.in_proj_weight) for each in (query, key, value)}
        weights_in: Any = own(self.in_proj_weight).chunk(3)
        biases: Any = (None,) * 3 if self.in_proj_bias is None else own(self.in_proj_bias).chunk(3)
        q, k, v = (
            self._heads(F.linear(entered[id(each)], weight, bias), each.dim())
            for each, weight, bias in zip((query, key, value), weights_in, biases, strict=True)
        )
        mask = self._mask(attn_mask, key_padding_mask, q, k)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
            local = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            attended = local @ v
            weights = self._joint_weights(local, average_attn_weights)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        joined = attended.transpose(1, 2).flatten(2)
        if query.dim() == 2:
            joined, weights = joined.squeeze(0), None if weights is None else weights.squeeze(0)
        elif not self.batch_first:
            joined = joined.transpose(0, 1)
        output = summed(F.linear(joined, own(self.out_proj.weight)), self.out_proj.weight)
        return output if self.out_proj.bias is None else output + self.out_proj.bias, weights

    def _heads(self, projected: torch.Tensor, dims: int) -> torch.Tensor:
        """Return shape (batch, heads of this rank, length, width of a head)."""
        if dims == 2:
            projected = projected.unsqueeze(0)
        elif not self.batch_first:
            projected = projected.transpose(0, 1)
        return projected.view(*projected.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def _mask(
        self, attn_mask: torch.Tensor | None, padding: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor | None:
        """Return what is added to the scores of this rank's heads: shape (batch or 1, heads or 1, queries, keys); or None."""
        total: torch.Tensor | None = None
        if attn_mask is not None:
            total = _added(attn_mask, q.dtype)
            if total.dim() == 3:  # (batch · all heads, queries, keys)
                first = self._mesh.get_local_rank() * q.shape[1]
                total = total.view(q.shape[0], self.num_heads, *total.shape[1:])[:, first : first + q.shape[1]]
        if padding is not None:
            of_keys = _added(padding, q.dtype).reshape(k.shape[0], 1, 1, k.shape[2])
            total = of_keys if total is None else total + of_keys
        return total

    def _joint_weights(self, local: torch.Tensor, average: bool) -> torch.Tensor:
        """Return the weights of all ranks' heads: their mean, or (batch, heads, queries, keys)."""
        part, placement = (local.sum(1) / self.num_heads, Partial()) if average else (local, Shard(1))
        return plain_result(DTensor.from_local(part, self._mesh, [placement], run_check=False))

    @property
    def _mesh(self) -> DeviceMesh:
        mesh: DeviceMesh = self.in_proj_weight.device_mesh  # type: ignore[attr-defined]
        return mesh


def slice_heads(layer: nn.MultiheadAttention, mesh: DeviceMesh) -> None:
    """Deal out the heads of an attention. It stays the same object and changes its class, so its hooks and attributes stay.

    Args:
        layer: The attention: one for which `can_slice` has no objection.
        mesh: A mesh of one axis.
    """
    for name in ("in_proj_weight", "in_proj_bias"):
        slice_parameter(layer, name, mesh, _StridedShard(0, split_factor=3))
    slice_parameter(layer.out_proj, "weight", mesh, Shard(1))
    layer.__class__ = SlicedAttention
    layer._qkv_same_embed_dim = False  # or torch's encoder layers read the weights themselves, in eval mode


def divide_heads(module: Any, mesh: DeviceMesh) -> None:
    """Let an attention of transformers, whose linear layers are sliced, compute with the heads of this rank.

    Args:
        module: The module, which returns its result and the weights of the heads, of shape (batch, heads, queries, keys), or
            None.
        mesh: A mesh of one axis.
    """
    if hasattr(module, "split_size"):  # GPT-2 cuts the queries, keys and values out of one tensor
        module.split_size //= mesh.size()
    module.register_forward_hook(functools.partial(_join_weights, mesh), prepend=True)  # before those that look at them


def _join_weights(mesh: DeviceMesh, module: nn.Module, args: Any, result: Any) -> Any:
    output, weights, *others = result
    if weights is None:
        return result
    return output, plain_result(DTensor.from_local(weights, mesh, [Shard(1)], run_check=False)), *others


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask that is added to scores. In a mask of bool, True means: not attended to."""
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def can_slice(plain: Any, ranks: int) -> str:
    """Return why an attention cannot be sliced over so many ranks; an empty text if it can."""
    if plain.num_heads % ranks:
        return f"{plain.num_heads} heads are not divisible by {ranks} ranks"
    if plain.in_proj_weight is None:
        return "query, key and value have different widths"
    if plain.bias_k is not None or plain.add_zero_attn:
        return "add_bias_kv and add_zero_attn are not supported"
    return altered(plain, ("in_proj_weight", "in_proj_bias")) or altered(plain.out_proj)
