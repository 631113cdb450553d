"""`TorchGradientState` compares gradients at two moments by versions and norms, without comparing each value."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class TorchGradientState:
    """The `hvdlite.gradients.device.loop_profile.GradientState` of torch gradients: their state at the moment it is made.

    Args:
        gradients: The gradients of all parameters. This object keeps them alive.
    """

    def __init__(self, gradients: Sequence[torch.Tensor | None]) -> None:
        self._versions = [(gradient, 0 if gradient is None else gradient._version) for gradient in gradients]
        # Some changes make no new version: those through p.grad.data, and those of a GradScaler.
        dense = [gradient.detach() for gradient in gradients if gradient is not None and not gradient.is_sparse]
        self._norms = [norm.nan_to_num(0.0) for norm in torch._foreach_norm(dense)] if dense else []

    def is_like(self, other: TorchGradientState) -> bool:
        """Return whether the gradients are the same as in `other`, as far as can be seen. The host may wait for the device."""
        same = all(
            mine is theirs and version == now
            for (mine, version), (theirs, now) in zip(self._versions, other._versions, strict=True)
        )
        return same and all(map(torch.equal, self._norms, other._norms))
