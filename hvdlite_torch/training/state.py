"""Functions that send parameters, optimizer state and objects from one rank to all ranks."""

from __future__ import annotations

import contextlib
import io
import pickle
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

import hvdlite
from hvdlite import ProcessSet
from hvdlite.adapter.agreement import all_together, together
from hvdlite.adapter.arguments import rank_in, root_within
from hvdlite.errors import ArgumentError
from hvdlite.gradients.lossy.names import LOSSY
from hvdlite_torch.ops.broadcast import broadcast_
from hvdlite_torch.step.wrapped import Aggregating, Distributed, Sharded
from hvdlite_torch.tensors.sliced import local_of, local_state, program_state
from hvdlite_torch.tensors.split import check_apart, optimizer_parameters

T = TypeVar("T")

_EXTRA = "_extra_state"
"""The key in torch's state dicts of the value that a module's `get_extra_state` returns."""


def broadcast_parameters(
    params: torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, Any] | torch.Tensor],
    root_rank: int = 0,
    *,
    process_set: ProcessSet = hvdlite.global_process_set,
) -> None:
    """Overwrite the tensors of every rank with the root's values, in place.

    Args:
        params: A model, or ``model.state_dict()``, which means the same; or ``model.named_parameters()``, which leaves out the
            buffers; or tensors without names, in the same order on all ranks.
        root_rank: The rank in the job of the root, whose values all ranks get; also with a process set.
        process_set: The ranks that take part; all ranks by default.

    Raises:
        ArgumentError: `params` contains something else; or the ranks have different slices or stages of a model.
        MismatchError: The ranks' tensors or their names differ. All ranks raise it.

    Examples:
        >>> def start():
        ...     layer = torch.nn.Linear(2, 1)
        ...     torch.nn.init.constant_(layer.weight, 5 + hvd.rank())
        ...     hvd.broadcast_parameters(layer, root_rank=1)
        ...     return layer.weight.tolist()
        >>> on_ranks(2, start)
        [[[6.0, 6.0]], [[6.0, 6.0]]]
    """
    model = params if isinstance(params, torch.nn.Module) else None
    if isinstance(params, torch.nn.Module):
        params = params.state_dict()
    if isinstance(params, torch.optim.Optimizer):
        raise ArgumentError("broadcast_parameters takes a model; for an optimizer there is broadcast_optimizer_state.")
    if not isinstance(params, Iterable):
        raise ArgumentError(f"expected a model, or model.state_dict(); got a {type(params).__name__}.")
    given: list[Any] = list(params.items() if isinstance(params, Mapping) else params)
    unnamed = [(str(number), value) for number, value in enumerate(given) if isinstance(value, torch.Tensor)]
    items = unnamed or sorted(given, key=lambda item: item[0])
    extra = [(name, value) for name, value in items if str(name).endswith(_EXTRA)]
    items = [item for item in items if not str(item[0]).endswith(_EXTRA)]
    tensors = []
    for name, value in items:
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(
                f"expected tensors by name, as model.state_dict() has them; {name!r} is a {type(value).__name__}."
            )
        tensors.append(value)
    together(process_set).check_same(
        [*(repr(name) for name, _ in [*items, *extra]), f"no more than these {len(items) + len(extra)}"],
        "the tensors that broadcast_parameters is given",
    )
    _broadcast(tensors, root_rank, process_set)
    if extra and model is not None:
        _broadcast_extra_states(model, root_rank, process_set)
    elif extra:
        _check_extra_states(extra, process_set)


def _broadcast_extra_states(model: torch.nn.Module, root_rank: int, process_set: ProcessSet) -> None:
    """Give all ranks the root's extra states of the modules of a model: see `torch.nn.Module.get_extra_state`."""
    own = torch.nn.Module.get_extra_state
    modules = {name: each for name, each in model.named_modules() if type(each).get_extra_state is not own}
    states = {name: module.get_extra_state() for name, module in modules.items()}
    for name, state in broadcast_object(states, root_rank, process_set=process_set).items():
        if rank_in(process_set) != root_within(process_set, root_rank):
            modules[name].set_extra_state(state)


def _check_extra_states(extra: Sequence[tuple[str, Any]], process_set: ProcessSet) -> None:
    """Raise MismatchError on all ranks if the modules' extra states differ.

    A state dict has only copies of the extra states, so they cannot be overwritten in it.
    """
    together(process_set).check_same(
        [f"{name!r} with checksum {zlib.crc32(pickle.dumps(value)):08x}" for name, value in extra],
        "extra states, which can be set in a model only: use hvd.broadcast_parameters(model), for it",
    )


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,
    *,
    process_set: ProcessSet = hvdlite.global_process_set,
) -> None:
    """Give every rank's optimizer the state and the settings (learning rate, momentum, …) of the root's optimizer.

    Each rank keeps what is its own: the errors that `Compression.powersgd` and `Compression.topk` remember for it, and the
    gradients in ``p.grad``. A program may call this at any time. The function makes no step in order to create missing state,
    and does not change the root's optimizer.

    Args:
        optimizer: An optimizer of the same parameters on every rank.
        root_rank: The rank in the job of the root, whose state all ranks get; also with a process set.
        model: Horovod's argument, which has no effect.
        process_set: The ranks that take part; all ranks by default.

    Raises:
        ArgumentError: `optimizer` is not an optimizer; or the ranks have different slices or stages of its model.
        MismatchError: The ranks have optimizers of different classes. All of them raise it.

    Examples:
        >>> def start():
        ...     optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1 if hvd.rank() == 0 else 0.9)
        ...     hvd.broadcast_optimizer_state(optimizer)
        ...     return optimizer.param_groups[0]["lr"]
        >>> on_ranks(2, start)
        [0.1, 0.1]
    """
    if not callable(getattr(optimizer, "load_state_dict", None)) or isinstance(optimizer, torch.nn.Module):
        raise ArgumentError(
            f"broadcast_optimizer_state takes an optimizer; got a {type(optimizer).__name__}. For a model there is "
            "broadcast_parameters."
        )
    if hasattr(optimizer, "_hvdlite_training"):
        raise ArgumentError(
            "broadcast_optimizer_state: the servers of AsyncDistributedOptimizer have the state, which is one for all ranks. "
            "Leave out this call, or make it with the plain optimizer, before."
        )
    all_together("broadcast_optimizer_state", process_set).check_same(
        [f"the optimizer is a {type(optimizer).__name__}"], "what broadcast_optimizer_state is given"
    )
    _broadcast_state(optimizer, root_rank, process_set)


def share_state(optimizer: torch.optim.Optimizer, root_rank: int, *, process_set: ProcessSet) -> None:
    """Give every rank's optimizer the state of the root's, but not the state of its aggregator.

    A rank that has joined has taken part in the steps of the others with its own aggregator.

    Args:
        optimizer, root_rank, process_set: See `broadcast_optimizer_state`.
    """
    _broadcast_state(optimizer, root_rank, process_set, left_out="aggregator")


def _broadcast_state(
    optimizer: torch.optim.Optimizer, root_rank: int, process_set: ProcessSet, left_out: str = ""
) -> None:
    rank, root = rank_in(process_set), root_within(process_set, root_rank)
    check_apart(optimizer_parameters(optimizer), _ranks_of(process_set), hvdlite.rank())
    tensors: list[torch.Tensor] = []
    message = None
    if isinstance(optimizer, Sharded):
        # Each rank has a shard of the state, so all ranks take part in gathering the whole state.
        with optimizer._hvdlite_sharding.whole_state(root):
            state = super(Sharded, optimizer).state_dict()  # type: ignore[misc]
    else:
        state = optimizer.state_dict() if rank == root else None
    if state is not None:
        state.pop(left_out, None)
    if rank == root:
        buffer = io.BytesIO()
        _Pickler(buffer, tensors).dump(state)
        tensors = list(map(local_of, tensors))
        message = (buffer.getvalue(), [(tuple(t.shape), t.dtype, t.device.type) for t in tensors])
    skeleton, layout = hvdlite.broadcast_object(message, root, process_set=process_set)  # type: ignore[misc]
    if rank == root:
        tensors = [tensor.detach().contiguous() for tensor in tensors]
    else:
        # A device without an index is this rank's own GPU, if it is a GPU.
        tensors = [torch.empty(shape, dtype=dtype, device=kind) for shape, dtype, kind in layout]
    _broadcast(tensors, root_rank, process_set)
    if rank != root or isinstance(optimizer, Sharded):
        found = _Unpickler(io.BytesIO(skeleton), tensors).load()
        if (
            isinstance(optimizer, Aggregating)
            and isinstance(optimizer._hvdlite_aggregator, LOSSY)
            and "aggregator" in found
        ):
            found["aggregator"]["errors"] = optimizer._hvdlite_aggregator.state_dict()["errors"]
        load_optimizer_state(optimizer, found)
    if isinstance(optimizer, Distributed):
        optimizer._hvdlite_driver.have_same_state()


def load_optimizer_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load a state and keep its dtypes. (torch's `load_state_dict` casts the state to the dtypes of the parameters.)"""
    with optimizer._hvdlite_sharding.loading() if isinstance(optimizer, Sharded) else contextlib.nullcontext():
        optimizer.load_state_dict(state_dict)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for key, values in state_dict["state"].items():
            parameter = parameters[key] if isinstance(key, int) else key
            optimizer.state[parameter] = _with_dtypes_of(values, optimizer.state[parameter])
        # Slices have travelled as plain tensors.
        optimizer.state.update(program_state(local_state(optimizer.state), parameters))


def _with_dtypes_of(sent: Any, loaded: Any) -> Any:
    """Return the loaded value, with the tensors that were sent in the place of tensors that loading has cast."""
    if isinstance(sent, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype is sent.dtype else sent.to(loaded.device)
    if type(sent) is dict and isinstance(loaded, dict) and sent.keys() == loaded.keys():
        return {key: _with_dtypes_of(value, loaded[key]) for key, value in sent.items()}
    if type(sent) in (list, tuple) and type(loaded) is type(sent) and len(sent) == len(loaded):
        return type(sent)(map(_with_dtypes_of, sent, loaded))
    return loaded


def _ranks_of(process_set: ProcessSet | None) -> list[int]:
    return (hvdlite.global_process_set if process_set is None else process_set).ranks


def _broadcast(tensors: list[torch.Tensor], root_rank: int, process_set: ProcessSet) -> None:
    """Broadcast the tensors in host memory, then the tensors on the GPU.

    A model may have both, and an optimizer on the GPU has its step counts in host memory.
    """
    check_apart(tensors, _ranks_of(process_set), hvdlite.rank())
    tensors = list(map(local_of, tensors))
    for on_host in (True, False):
        some = [tensor for tensor in tensors if tensor.is_cpu is on_host]
        if some or (on_host and not tensors):  # a rank without tensors takes part, so that a mismatch is found
            broadcast_(some, root_rank, process_set=process_set)


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = hvdlite.global_process_set
) -> T:
    """Give every rank the root's object. See `hvdlite.broadcast_object` for the other arguments, the result and the errors.

    Args:
        root_rank: The rank in the job of the root, also with a process set.

    Examples:
        >>> on_ranks(2, lambda: hvd.broadcast_object(f"from rank {hvd.rank()}", root_rank=1))
        ['from rank 1', 'from rank 1']
    """
    return hvdlite.broadcast_object(obj, root_within(process_set, root_rank), name, process_set=process_set)


def allgather_object(
    obj: T, name: str | None = None, *, process_set: ProcessSet = hvdlite.global_process_set
) -> list[T]:
    """Give every rank the objects of all ranks. This is `hvdlite.allgather_object`.

    Examples:
        >>> on_ranks(2, lambda: hvd.allgather_object({"rank": hvd.rank()}))[0]
        [{'rank': 0}, {'rank': 1}]
    """
    return hvdlite.allgather_object(obj, name, process_set=process_set)


class _Pickler(pickle.Pickler):
    """A pickler that leaves out the tensors of an object and appends them to a list."""

    def __init__(self, buffer: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        self._tensors.append(obj)
        return len(self._tensors) - 1


class _Unpickler(pickle.Unpickler):
    """An unpickler that puts the tensors of a list in the places where `_Pickler` left them out."""

    def __init__(self, buffer: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(buffer)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]
