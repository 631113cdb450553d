"""What torch can tell of gradients without looking at each value: whether they have changed between two moments."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class TorchGradientState:
    """What gradients are now, as `hvdlite.gradients.device.loop_profile.GradientState`.

    Args:
        gradients: Of all parameters. They are kept.
    """

    def __init__(self, gradients: Sequence[torch.Tensor | None]) -> None:
        self._versions = [(gradient, 0 if gradient is None else gradient._version) for gradient in gradients]
        # Some changes are no new versions: those through p.grad.data, and a GradScaler's.
        dense = [gradient.detach() for gradient in gradients if gradient is not None and not gradient.is_sparse]
        self._norms = [norm.nan_to_num(0.0) for norm in torch._foreach_norm(dense)] if dense else []

    def is_like(self, other: TorchGradientState) -> bool:
        """Whether nothing has changed, as far as can be seen. The host may wait for the device."""
        same = all(
            mine is theirs and version == now
            for (mine, version), (theirs, now) in zip(self._versions, other._versions, strict=True)
        )
        return same and all(map(torch.equal, self._norms, other._norms))
