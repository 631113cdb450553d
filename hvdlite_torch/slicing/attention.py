"""`SlicedAttention`: an `nn.MultiheadAttention` whose heads are dealt out to the ranks of a mesh.

Each rank projects the inputs to the queries, keys and values of its own heads (columns of the weights), attends with these, and
multiplies with its rows of the output projection. The sum over the ranks is the output: one all-reduce in the forward pass, one
in the backward pass (Megatron-LM, arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from hvdlite.errors import ArgumentError
from hvdlite_torch.slicing.results import plain_result, return_plain

_INPUTS = ("q_proj", "k_proj", "v_proj")


class SlicedAttention(nn.Module):
    """Does what an `nn.MultiheadAttention` does. Its inputs and outputs are plain tensors, equal on all ranks of the mesh.

    Args:
        plain: The attention whose weights are taken. Query, key and value have one width; there is no ``add_bias_kv`` and no
            ``add_zero_attn``.
        mesh: A mesh of one axis. Its size divides the number of heads.
    """

    in_proj_bias = None
    """torch's encoder layers read the weights of an attention themselves, unless this is None."""
    _qkv_same_embed_dim = True

    def __init__(self, plain: nn.MultiheadAttention, mesh: DeviceMesh) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = plain.embed_dim, plain.num_heads, plain.head_dim
        self.dropout, self.batch_first = plain.dropout, plain.batch_first
        self._mesh = mesh
        biases = [None] * 3 if plain.in_proj_bias is None else plain.in_proj_bias.chunk(3)
        for name, weight, bias in zip(_INPUTS, plain.in_proj_weight.chunk(3), biases, strict=True):
            setattr(self, name, _linear(weight, bias, plain.in_proj_weight.requires_grad))
        self.out_proj = _linear(plain.out_proj.weight, plain.out_proj.bias, plain.out_proj.weight.requires_grad)
        parallelize_module(self, mesh, {**dict.fromkeys(_INPUTS, ColwiseParallel()), "out_proj": RowwiseParallel()})
        return_plain(self.out_proj)
        self.train(plain.training)

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
        # A tensor that is query, key and value becomes one DTensor, so that its gradient is summed over the ranks once.
        shared = {id(each): self._replicated(each) for each in (query, key, value)}
        q, k, v = (
            self._heads(getattr(self, name)(shared[id(each)]), each.dim())
            for name, each in zip(_INPUTS, (query, key, value), strict=True)
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
        return self.out_proj(joined.contiguous()), weights

    def _replicated(self, tensor: torch.Tensor) -> DTensor:
        return DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False)

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
                own = slice(self._mesh.get_local_rank() * q.shape[1], (self._mesh.get_local_rank() + 1) * q.shape[1])
                total = total.view(q.shape[0], self.num_heads, *total.shape[1:])[:, own]
        if padding is not None:
            of_keys = _added(padding, q.dtype).reshape(k.shape[0], 1, 1, k.shape[2])
            total = of_keys if total is None else total + of_keys
        return total

    def _joint_weights(self, local: torch.Tensor, average: bool) -> torch.Tensor:
        """Return the weights of all ranks' heads: their mean, or (batch, heads, queries, keys)."""
        own, placement = (local.sum(1) / self.num_heads, Partial()) if average else (local, Shard(1))
        return plain_result(DTensor.from_local(own, self._mesh, [placement], run_check=False))

    @staticmethod
    def as_plain(state: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
        """Return whole tensors under the names that they have in `nn.MultiheadAttention`.

        Args:
            state: Tensors by name, those of this attention as whole tensors.
            prefix: The name of this attention, with a dot.
        """
        named = {f"{prefix}out_proj.{kind}": state.get(f"{prefix}out_proj.{kind}") for kind in ("weight", "bias")}
        for kind in ("weight", "bias"):
            parts = [state[key] for each in _INPUTS if (key := f"{prefix}{each}.{kind}") in state]
            named[f"{prefix}in_proj_{kind}"] = torch.cat(parts) if parts else None
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def _linear(weight: torch.Tensor, bias: torch.Tensor | None, trained: bool) -> nn.Linear:
    """Return a layer with copies of a weight of shape (out, in) and a bias of shape (out,)."""
    layer = nn.Linear(
        weight.shape[1], weight.shape[0], bias is not None, device=weight.device, dtype=weight.dtype
    ).requires_grad_(trained)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


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
    return ""
