"""`full_state_dict` puts the slices of a model together again."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of a model with whole tensors, under the names that it had before `slice_layers`.

    All ranks that hold slices call this. Without slices it is ``model.state_dict()``.
    """
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }
