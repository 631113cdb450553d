"""`GroupAndBackend`: what torch asks of a process group and of its backend, besides collectives and messages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.constants import default_pg_timeout

from hvdlite import api
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.comm.ordered.calls import CollectiveCall
from hvdlite.comm.ordered.communicator import Communicator
from hvdlite.errors import DeviceError, NotYetError, UnsupportedTensorError
from hvdlite_torch.distributed.operands import Operand
from hvdlite_torch.distributed.work import CollectiveWork, SeveralWorks

Tensors = Sequence[torch.Tensor]
Run = Callable[[HierarchicalCollectives], None]


Method = TypeVar("Method", bound=Callable[..., Any])


OLDER_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""The names that methods of torch's process groups had before torch 2.13 (seen in 2.11)."""


def on_any_device(method: Method) -> Method:
    """Let a method of a process group hand tensors on a GPU to torch's own backend there."""
    name = method.__name__

    @functools.wraps(method)
    def chosen(self: GroupAndBackend, *args: Any, **kwargs: Any) -> Any:
        tensor = _first_tensor((*args, *kwargs.values()))
        if tensor is None or not tensor.is_cuda:
            return method(self, *args, **kwargs)
        there = self.on_gpu
        return getattr(there, name if hasattr(there, name) else OLDER_NAMES[name])(*args, **kwargs)

    return chosen  # type: ignore[return-value]


def also_bare(tensors: int, *options: str) -> Callable[[Method], Method]:
    """Let a method that takes lists of tensors and options take tensors too, and the options one by one, as torch's own do.

    Args:
        tensors: How many of the arguments are tensors.
        options: The options that may follow, by their names in torch's class for them.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def chosen(self: GroupAndBackend, *given: Any, **named: Any) -> dist.Work:
            lists, others = list(given[:tensors]), given[tensors:]
            if any(isinstance(each, torch.Tensor) for each in lists):
                lists = [[each] for each in lists]
            if others and type(others[0]).__name__.endswith("Options"):
                return method(self, *lists, *others, **named)  # type: ignore[no-any-return]
            chosen = dict(zip(options, others, strict=False)) | {
                _OPTIONS.get(name, name): value for name, value in named.items() if name != "opts"
            }
            opts = named.get("opts") or SimpleNamespace(**{"reduceOp": dist.ReduceOp.SUM, **chosen})
            return method(self, *lists, opts)  # type: ignore[no-any-return]

        return chosen  # type: ignore[return-value]

    return decorate


_OPTIONS = {"op": "reduceOp", "root": "rootRank"}


def _first_tensor(given: Any) -> Any:
    """Return the first tensor in nested lists; None if there is none."""
    for each in given:
        found = _first_tensor(each) if isinstance(each, list | tuple) else each
        if hasattr(found, "is_cuda"):
            return found
    return None


def _has_nccl() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


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
        self._begun = self._splits = 0

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

    @functools.cached_property
    def on_gpu(self) -> dist.ProcessGroup:
        """The process group over the same ranks with torch's NCCL backend. NCCL connects the ranks at the first call.

        Raises:
            DeviceError: This torch has no NCCL.
        """
        if not _has_nccl():
            raise DeviceError(
                "a tensor is on a GPU, and this torch has no NCCL: use tensor.cpu(), or a torch for CUDA."
            )
        store = PrefixStore("cuda/", self._store)
        group = dist.ProcessGroup(store, self._rank, self._size)
        options = dist.ProcessGroupNCCL.Options()
        nccl = dist.ProcessGroupNCCL(store, self._rank, self._size, options)
        group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
        group._set_group_name(self._name)  # type: ignore[arg-type]
        return group

    def _get_backend(self, device: torch.device) -> Any:
        kind = torch.device(device).type
        if kind == "cuda":
            return self.on_gpu._get_backend(torch.device("cuda"))
        if kind != "cpu":
            raise RuntimeError(f"the backend hvdlite has no way for tensors on {device}.")
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = ("cpu", "cuda") if _has_nccl() else ("cpu",)
        return [torch.device(kind) for kind in kinds]

    def get_group_store(self) -> Store:
        return self._store

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def _start_coalescing(self, device: torch.device) -> None:
        if torch.device(device).type == "cuda":
            self.on_gpu._start_coalescing(device)
        else:
            self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        if torch.device(device).type == "cuda":
            return self.on_gpu._end_coalescing(device)
        works, self._coalesced = self._coalesced or [], None
        return SeveralWorks(works)

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the ranks count their calls from the beginning."""

    def _get_sequence_number_for_group(self) -> int:
        return self._begun

    def shutdown(self) -> None:
        self.communicator.close()
        if "on_gpu" in vars(self):
            self.on_gpu.shutdown()

    abort = shutdown

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        raise NotYetError("monitored_barrier: every wait of hvdlite names who is missing; use barrier().")

    def set_timeout(self, timeout: Any) -> None:
        raise NotYetError(
            "the time limit of a group is that of init_process_group(timeout=...) or new_group(timeout=...)."
        )

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> dist.ProcessGroup | None:
        """Make a group of some ranks of this one, as `torch.distributed.split_group` asks for. All ranks of this group call it.

        Args:
            ranks: Ranks of this group, ascending: those with which this rank is to be, or any others if it is to be in none.
            timeout: The longest time of one call; None for the setting `stall_shutdown_time_seconds`.
            opts, device_types: Not used.
            group_name, group_desc: The name and the description in torch.

        Returns:
            The group; None on other ranks.
        """
        self._splits += 1
        if self._rank not in ranks:
            return None
        name = group_name or f"{self._name}:split:{self._splits}:{','.join(map(str, ranks))}"
        limit = None if timeout in (None, default_pg_timeout) else timeout.total_seconds()
        members = [self.communicator.members.ranks[rank] for rank in ranks]
        communicator = api.world().communicators.new(members, f"the torch group {name}", limit)
        made = type(self)(PrefixStore(f"{name}/", self._store), name, communicator)
        made.setGroupDesc(group_desc or "")
        return made

    def _operands(self, tensors: Tensors, are_written: bool = False) -> list[Operand]:
        if isinstance(tensors, torch.Tensor):
            raise NotYetError(
                "send and recv of a group take lists of tensors: call torch.distributed's functions, with group=."
            )
        for tensor in tensors:
            if not tensor.is_cpu:
                raise UnsupportedTensorError(f"expected tensors in host memory; got one on {tensor.device}.")
        return [Operand(tensor, are_written) for tensor in tensors]

    def _outputs(self, tensors: Tensors) -> list[Operand]:
        """The operands to which a collective writes."""
        return self._operands(tensors, True)

    def _begin(self, text: str, run: Run, results: Tensors, opts: Any) -> dist.Work:
        self._begun += 1
        call = CollectiveCall(text, run)
        pending = self.communicator.submit(call, background=getattr(opts, "asyncOp", True))
        return self._note(CollectiveWork(self.communicator, pending, results))

    def _note(self, work: dist.Work) -> dist.Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work
