"""`full_state_dict` puts the slices of a model together again."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hvdlite_torch.slicing.attention import SlicedAttention


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of a model with whole tensors, under the names that it had before `slice_layers`.

    All ranks that hold slices call this. Without slices it is ``model.state_dict()``.
    """
    state = {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }
    for name, module in model.named_modules():
        if isinstance(module, SlicedAttention):
            prefix = f"{name}." if name else ""
            plain = SlicedAttention.as_plain(state, prefix)
            state = {each: value for each, value in state.items() if not each.startswith(prefix)}
            state.update(plain)
    return state
