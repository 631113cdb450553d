"""`GroupAndBackend`: what torch asks of a process group and of its backend, besides collectives and messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.communicator.calls import Call
from hvdlite.communicator.communicator import Communicator
from hvdlite.errors import NotYetError, UnsupportedTensorError
from hvdlite_torch.distributed.operands import Operand
from hvdlite_torch.distributed.work import CollectiveWork, SeveralWorks

Tensors = Sequence[torch.Tensor]
Run = Callable[[HierarchicalCollectives], None]


class GroupAndBackend(dist.ProcessGroup):
    """A process group that is its own backend, because a backend cannot be made in Python in torch 2.13.

    Args:
        store: The store that torch keeps for the group.
        name: The name of the group in torch.
        communicator: The communicator over the same ranks.
    """

    supports_coalescing = supports_splitting = supports_shrinking = supports_time_estimate = False
    """Torch asks a backend for these. It then makes coalesced messages one by one, and new groups by `new_group`."""

    def __init__(self, store: Store, name: str, communicator: Communicator) -> None:
        # The constructor with a store makes an object that C++ does not let Python subclass.
        super().__init__(communicator.rank, communicator.size)  # type: ignore[call-arg]
        self._store, self._name, self._desc = store, name, ""
        self.communicator = communicator
        self._rank, self._size = communicator.rank, communicator.size
        self._coalesced: list[dist.Work] | None = None
        self._begun = 0

    # What torch asks of a group and of a backend

    def getBackendName(self) -> str:
        return "hvdlite"

    name = getBackendName

    # The base class asks its backends for these two, and has none.

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def _get_backend(self, device: torch.device) -> GroupAndBackend:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"the backend hvdlite has no way for tensors on {device}.")
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def get_group_store(self) -> Store:
        return self._store

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return SeveralWorks(works)

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the ranks count their calls from the beginning."""

    def _get_sequence_number_for_group(self) -> int:
        return self._begun

    def shutdown(self) -> None:
        self.communicator.close()

    abort = shutdown

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        raise NotYetError("monitored_barrier: every wait of hvdlite names who is missing; use barrier().")

    def set_timeout(self, timeout: Any) -> None:
        raise NotYetError(
            "the time limit of a group is that of init_process_group(timeout=...) or new_group(timeout=...)."
        )

    def _operands(self, tensors: Tensors) -> list[Operand]:
        if isinstance(tensors, torch.Tensor):
            raise NotYetError(
                "methods of a group take lists of tensors here: call torch.distributed's functions, with group=."
            )
        for tensor in tensors:
            if not tensor.is_cpu:
                raise UnsupportedTensorError(f"expected tensors in host memory; got one on {tensor.device}.")
        return [Operand(tensor) for tensor in tensors]

    def _begin(self, text: str, run: Run, results: Tensors, opts: Any) -> dist.Work:
        self._begun += 1
        call = Call(text, run)
        pending = self.communicator.submit(call, background=getattr(opts, "asyncOp", True))
        return self._note(CollectiveWork(self.communicator, pending, results))

    def _note(self, work: dist.Work) -> dist.Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work
