"""`ProcessGrid` for torch: a grid of hvdlite's that is a `DeviceMesh` too."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hvdlite import api
from hvdlite_torch.distributed import backend


class ProcessGrid(api.ProcessGrid):
    __doc__ = api.ProcessGrid.__doc__

    def to_torch(self, device_type: str = "cpu") -> DeviceMesh:
        """Return a mesh of the same axes, for FSDP, DTensor and `parallelize_module`. All ranks of the job call this together.

        The first call starts torch.distributed with the backend "hvdlite", if the program has not started it.

        Args:
            device_type: The type of the devices on which the tensors lie, as in `DeviceMesh`.
        """
        if not dist.is_initialized():
            backend.init(torch_distributed=True)
        return DeviceMesh(device_type, torch.from_numpy(self.ranks.copy()), mesh_dim_names=tuple(self.axes))
