"""Enters the backend in torch, and makes process groups for it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from hvdlite import api
from hvdlite.errors import ArgumentError
from hvdlite.ranks.process_set import ProcessSet
from hvdlite_torch.distributed import rendezvous
from hvdlite_torch.distributed.process_group import HvdliteProcessGroup
from hvdlite_torch.tensors.malloc import keep_freed_memory

NAME = "hvdlite"


def register() -> None:
    """Enter the backend in torch. torch keeps it as long as the process lives."""
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    rendezvous.register()


def _create(options: Any, backend_options: Any) -> HvdliteProcessGroup:
    """Make a process group; torch calls this on its members only.

    Raises:
        ArgumentError: Torch and MPI count the ranks differently, or there are options, which this backend does not have.
    """
    if backend_options is not None:
        raise ArgumentError(f"pg_options={backend_options!r}: the backend hvdlite has no options.")
    api.init()
    ranks = tuple(options.global_ranks_in_group)
    name = f"the torch group {options.group_id}"
    if not ranks:
        ranks, name = tuple(range(api.size())), "the default group of torch.distributed"
        _forget_meshes()
    if options.group_size != len(ranks) or ranks[options.group_rank] != api.rank():
        raise ArgumentError(
            f"torch.distributed counts this process as rank {options.group_rank} of {options.group_size}, and MPI as rank "
            f"{api.rank()} of {api.size()}. Do not set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: hvdlite needs none."
        )
    keep_freed_memory(api.world().config)  # DDP and FSDP free their gradients in each step, as everybody does
    limit = None if options.timeout == default_pg_timeout else options.timeout.total_seconds()
    return HvdliteProcessGroup(options.store, options.group_id, api.world().communicators.new(ranks, name, limit))


def _forget_meshes() -> None:
    """Let DTensor forget the meshes of an earlier default group. It takes them for equal meshes of the new one, whose
    groups have other names."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def group_of(process_set: ProcessSet) -> dist.ProcessGroup:
    """Make a torch group of a process set. Its ranks call this, and no others. torch.distributed is started if need be."""
    init(torch_distributed=True)
    group = dist.new_group(list(process_set.members), backend=NAME, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def mesh_of(process_set: ProcessSet) -> DeviceMesh:
    """Make a mesh of one axis of a process set. Its ranks call this, and no others."""
    return DeviceMesh.from_group(group_of(process_set), "cpu")


def init(
    comm: Sequence[int] | Any | None = None,
    process_sets: Iterable[ProcessSet | Iterable[int]] | str | None = None,
    torch_distributed: bool = False,
) -> None:
    """Join the job, as `hvdlite.init` does, and make torch.distributed ready if asked.

    Args:
        comm, process_sets: See `hvdlite.init`.
        torch_distributed: Call ``torch.distributed.init_process_group("hvdlite")`` too, unless torch.distributed is ready.

    Raises:
        HvdliteError: See `hvdlite.init`.

    Examples:
        >>> def program():
        ...     hvd.init()  # makes no difference here: `on_ranks` lets threads be ranks that have joined
        ...     return hvd.rank(), hvd.size()
        >>> on_ranks(2, program)
        [(0, 2), (1, 2)]
    """
    api.init(comm, process_sets)
    if torch_distributed:
        _start()


def _start(init_method: str | None = None) -> None:
    if dist.is_initialized():
        group = dist.group.WORLD
        if not isinstance(group, HvdliteProcessGroup) or group.communicator.is_open:
            return
        dist.destroy_process_group()  # it belongs to a job that has ended by shutdown()
    dist.init_process_group(NAME, init_method=init_method)


def start_for(user: str) -> None:
    """Join the job, and start torch.distributed with this backend, for a framework that uses its default group.

    Args:
        user: What needs the group, for the text of the error.

    Raises:
        ArgumentError: The program has started torch.distributed with another backend.
    """
    api.init()
    _start("hvdlite://")  # Accelerate leaves a MASTER_PORT in the environment, which is not meant for us
    if not isinstance(dist.group.WORLD, HvdliteProcessGroup):
        raise ArgumentError(
            f"{user}: torch.distributed runs over {dist.get_backend()} already. Leave out what starts it, or say "
            f'torch.distributed.init_process_group("{NAME}").'
        )
