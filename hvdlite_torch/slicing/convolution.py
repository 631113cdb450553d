"""`SlicedConvolution`: a convolution whose output channels are dealt out to the ranks of a mesh.

Each rank computes its channels from the whole input, and the channels are gathered. The gradient of the input is the sum of
what the ranks' channels give.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from hvdlite_torch.slicing.results import plain_result

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
KINDS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
"""The classes that can be sliced, each with its number of spatial dimensions."""


class SlicedConvolution(nn.Module):
    """Does what a convolution does. Its inputs and outputs are plain tensors, equal on all ranks of the mesh.

    Args:
        plain: The convolution whose weights are taken.
        mesh: A mesh of one axis. Its size divides the number of output channels.
    """

    def __init__(self, plain: Convolution, mesh: DeviceMesh) -> None:
        super().__init__()
        self._mesh, self._dims = mesh, KINDS[type(plain)]
        for name in ("weight", "bias"):
            whole: nn.Parameter | None = getattr(plain, name)
            sliced = None
            if whole is not None:
                sliced = nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)]), whole.requires_grad)
            self.register_parameter(name, sliced)
            plain.register_parameter(name, None)
        self._plain = [plain]  # in a list, so that it is no child: it has the settings, and no weights
        self.train(plain.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the forward pass of the plain convolution."""
        (plain,), mesh = self._plain, self._mesh
        own = DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
        weight, bias = (None if each is None else each.to_local() for each in self._parameters.values())  # type: ignore[attr-defined]
        y = plain._conv_forward(own, weight, bias)  # type: ignore[arg-type]
        channels = y.dim() - self._dims - 1
        return plain_result(DTensor.from_local(y.contiguous(), mesh, [Shard(channels)], run_check=False))

    def extra_repr(self) -> str:
        return f"{self._plain[0].extra_repr()}, sliced over {self._mesh.size()} ranks"  # type: ignore[no-untyped-call]


def can_slice(plain: Convolution, ranks: int) -> str:
    """Return why a convolution cannot be sliced over so many ranks; an empty text if it can."""
    if plain.groups != 1:
        return f"{plain.groups} groups of channels"
    return (
        f"{plain.out_channels} output channels are not divisible by {ranks} ranks" if plain.out_channels % ranks else ""
    )
