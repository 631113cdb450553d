"""Lightning over hvdlite: ``Trainer(strategy=hvdlite_torch.lightning.strategy())`` under hvdliterun, mpirun or srun.

A program imports this module itself, because it imports Lightning. hvdlite says how many ranks there are and where they are, so
the program need not: Lightning starts no process, and needs neither MASTER_ADDR nor `devices` and `num_nodes` of the Trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvdlite import api
from hvdlite.checks import require
from hvdlite.errors import ArgumentError, NotYetError

# This check comes first, because the lines below import Lightning.
require("lightning", "frameworks", "hvdlite_torch.lightning")

from lightning.fabric.plugins.environments import ClusterEnvironment  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

from hvdlite_torch.distributed import backend  # noqa: E402

__all__ = ["strategy"]

_OURS = {
    "accelerator": "it is the Trainer's: Trainer(accelerator=...)",
    "parallel_devices": "it is the Trainer's: Trainer(devices=...)",
    "cluster_environment": "hvdlite knows its ranks",
    "process_group_backend": "it is hvdlite; for another one, use Lightning's own DDPStrategy",
    "start_method": "the launcher has started all ranks",
    "timeout": 'call torch.distributed.init_process_group("hvdlite", timeout=...) before',
}
"""The arguments of `DDPStrategy` that have no meaning here, and why."""


def strategy(**options: Any) -> DDPStrategy:
    """Return a strategy for Lightning's Trainer: DDP over the ranks of this job.

    The function joins the job and starts torch.distributed with the backend "hvdlite", if the program has not done so.

    Args:
        options: Arguments of Lightning's `DDPStrategy` and of torch's `DistributedDataParallel`, such as
            ``find_unused_parameters=True`` or ``ddp_comm_hook=...``.

    Raises:
        ArgumentError: An option is hvdlite's to choose, or torch.distributed runs with another backend.
        NotYetError: The hosts have different numbers of ranks, for which Lightning has no place.
    """
    for name in options:
        if name in _OURS:
            raise ArgumentError(f"strategy({name}=...): leave it out, {_OURS[name]}.")
    api.init()
    require_equal_hosts()
    backend.start_for("hvdlite_torch.lightning.strategy")
    return _Strategy(cluster_environment=JobEnvironment(), process_group_backend=backend.NAME, **options)


def require_equal_hosts() -> None:
    """Raise unless all hosts have the same number of ranks.

    Raises:
        NotYetError: They have not. All ranks raise it.
    """
    if not api.is_homogeneous():
        raise NotYetError(
            f"Lightning counts ranks as num_nodes × devices, so it needs the same number of ranks on each host. Here the hosts "
            f"differ: the host of rank {api.rank()} has {api.local_size()} of {api.size()} ranks. Start as many on each: "
            "hvdliterun -H host1:2,host2:2."
        )


class JobEnvironment(ClusterEnvironment):  # type: ignore[misc]  # mypy does not see Lightning
    """What Lightning asks about the ranks: hvdlite's numbers."""

    creates_processes_externally = True

    @property
    def main_address(self) -> str:
        raise NotYetError("hvdlite's ranks find each other without an address: the program needs no MASTER_ADDR.")

    main_port = main_address

    @staticmethod
    def detect() -> bool:
        return api.is_initialized()

    def world_size(self) -> int:
        return api.size()

    def global_rank(self) -> int:
        return api.rank()

    def local_rank(self) -> int:
        return api.local_rank()

    def node_rank(self) -> int:
        """Return the number of this host. `require_equal_hosts` makes sure that it is the cross rank."""
        return api.cross_rank()

    def set_world_size(self, size: int) -> None:
        """Do nothing: Lightning computes what hvdlite has told it."""

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: Lightning counts host by host, and a launcher may deal the ranks out in turn."""


class _Strategy(DDPStrategy):  # type: ignore[misc]  # mypy does not see Lightning
    """DDP with as many devices and hosts as hvdlite has."""

    _devices: list[torch.device] | None = None

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        here = api.local_size()
        if devices is not None and len(devices) == 1 and devices[0].type == "cpu":
            devices = devices * here  # one is what Lightning says if the program says nothing
        if devices is not None and len(devices) != here:
            raise ArgumentError(
                f"the Trainer has {len(devices)} devices ({devices[0].type}) on a host with {here} ranks: leave devices= out, "
                f"or say devices={here}, or start {len(devices)} ranks on each host. "
                'Trainer(accelerator="cpu") needs no devices.'
            )
        self._devices = devices

    @property
    def num_nodes(self) -> int:
        return api.cross_size()

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        if number not in (1, api.cross_size()):  # one is what Lightning says if the program says nothing
            raise ArgumentError(f"Trainer(num_nodes={number}): the ranks are on {api.cross_size()}. Leave it out.")

    def setup_distributed(self) -> None:
        backend.start_for("Lightning")  # the program may have called shutdown() and init() since
        super().setup_distributed()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks. The average of integers is a float: Lightning divides sums by averaged counts."""
        averages = reduce_op in ("mean", "avg", dist.ReduceOp.AVG)
        if averages and isinstance(tensor, torch.Tensor) and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    def configure_ddp(self) -> None:
        """Wrap the model. A hook for communication works on the CPU too, where Lightning would leave it out."""
        super().configure_ddp()
        hook: Callable[..., Any] | None = self._ddp_comm_hook
        if hook is not None and self.root_device.type == "cpu":
            assert isinstance(self.model, DistributedDataParallel)
            if self._ddp_comm_wrapper is not None:
                hook = self._ddp_comm_wrapper(hook)
            self.model.register_comm_hook(self._ddp_comm_state, hook)
