"""`hvdlite.checkpoint` for torch: the states of modules and optimizers, also of those whose ranks have different parts."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch

from hvdlite.adapter.few_bytes.resumed import share_of
from hvdlite.checkpoint import Loaded, load, save, wait
from hvdlite.checkpoint.states import Snapshot, StateDict, Stateful
from hvdlite.checkpoint.structure import Own, TensorPiece
from hvdlite.errors import ArgumentError
from hvdlite.gradients.layout import Piece as Extent
from hvdlite_torch.step.shard_state import cut
from hvdlite_torch.step.wrapped import Aggregating, Distributed, Local, Sharded
from hvdlite_torch.tensors.sliced import full_state_dict, is_sliced, load_full_state_dict, local_of
from hvdlite_torch.tensors.split import all_stages, is_split, optimizer_parameters
from hvdlite_torch.training.state import load_optimizer_state
from hvdlite_torch.training.whole_state import NAMES, load_whole_state, part_of_whole_state

__all__ = ["Loaded", "load", "save", "wait"]


def stateful(value: Any) -> Stateful | None:
    """Return what saves and sets the state of an object of torch; None if it has none, as a tensor."""
    if isinstance(value, type) or not callable(getattr(value, "load_state_dict", None)):
        return None
    if callable(getattr(value, "gathered", None)):
        return _GatheredState(value)
    if callable(getattr(value, "full_optimizer_state_dict", None)):
        return _StagesState(value)
    if isinstance(value, torch.nn.Module):
        tensors = [tensor for tensor in value.state_dict().values() if isinstance(tensor, torch.Tensor)]
        return _SlicedState(value) if any(map(is_sliced, tensors)) else _ModuleState(value)
    if not isinstance(value, torch.optim.Optimizer) or hasattr(value, "_hvdlite_training"):
        return StateDict(value)
    if is_split(optimizer_parameters(value)):
        return _SplitState(value)
    if isinstance(value, Sharded):
        return _ShardedState(value)
    if isinstance(value, Local):
        return _LocalState(value)
    return _AggregatingState(value) if isinstance(value, Aggregating) else _OptimizerState(value)


class _ModuleState(StateDict):
    """The state of a module."""

    @property
    def copies(self) -> bool:  # type: ignore[override]
        return not any(map(_loads_in_its_own_way, self._target.modules()))

    def check(self, value: Any, rank: int, ranks: int) -> None:
        module = self._target
        if any(map(_loads_in_its_own_way, module.modules())):
            return
        # torch itself compares the names and shapes, with a copy of the module whose tensors have no memory.
        tensors = [*module.parameters(), *module.buffers()]
        memo: dict[int, Any] = {id(tensor): _without_memory(tensor) for tensor in tensors}
        try:
            shell = copy.deepcopy(module, memo)
        except Exception:  # something in it cannot be copied: then loading it shows whether it fits
            return
        states = copy.copy(value)  # torch keeps more in it than its keys
        for name, tensor in value.items():
            if isinstance(tensor, torch.Tensor):
                states[name] = _without_memory(tensor)
        shell.load_state_dict(states)


def _loads_in_its_own_way(module: torch.nn.Module) -> bool:
    """Tell whether code that is not torch's takes part in loading: it might do more than to compare."""
    names = ("load_state_dict", "_load_from_state_dict", "set_extra_state", "__deepcopy__")
    own = (cls for cls in type(module).__mro__ if not cls.__module__.startswith("torch.nn.modules."))
    hooks = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
    return bool(hooks) or any(name in vars(cls) for cls in own for name in names)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    meta = torch.empty_like(tensor.detach(), device="meta")
    return torch.nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else meta


class _GatheredState(StateDict):
    """The state of an `ElasticSampler`, of which each rank knows a part."""

    def snapshot(self, rank: int) -> Snapshot:
        return Snapshot(self._target.gathered())


class _StagesState(StateDict):
    """The state of a model in stages, such as a `Pipeline`. It is saved as that of the whole model, in one file."""

    @property
    def parts_of(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self._target.process_set.members)

    def snapshot(self, rank: int) -> Snapshot:
        return Snapshot(self._target.full_state_dict())


class _SlicedState(StateDict):
    """The state of a module that is sliced over ranks."""

    def snapshot(self, rank: int) -> Snapshot:
        return Snapshot(full_state_dict(self._target))

    def restore(self, value: Any, rank: int, ranks: int) -> None:
        load_full_state_dict(self._target, value)


class _OptimizerState:
    """The state of an optimizer that is the same on all ranks."""

    parts_of: tuple[int, ...] = ()
    copies = False

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def snapshot(self, rank: int) -> Snapshot:
        return Snapshot(self.optimizer.state_dict(), trained_by=self._trained_by)

    def check(self, value: Any, rank: int, ranks: int) -> None:
        if isinstance(value, list):
            value = value[rank % len(value)]
        groups = value.get("param_groups")
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            return
        optimizer = self.optimizer
        classes = [cls for cls in type(optimizer).__mro__ if issubclass(cls, torch.optim.Optimizer)]
        plain = next(cls for cls in classes if not issubclass(cls, Distributed))
        needed = {name for name in optimizer.defaults if all(name in group for group in optimizer.param_groups)}
        found = _with_defaults(plain, optimizer, groups)
        if lacking := sorted({name for group in found for name in needed if name not in group}):
            raise ValueError(
                f"this is the state of an optimizer of another class: its groups have {', '.join(sorted(groups[0]))}, and "
                f"no {', '.join(lacking)}, which {plain.__name__} needs. Nothing is loaded."
            )
        if not all(NAMES in group for group in groups) and not is_split(optimizer_parameters(optimizer)):
            there, here = ([len(group["params"]) for group in each] for each in (groups, optimizer.param_groups))
            if there != here:
                raise ValueError(
                    f"this is the state of an optimizer whose groups have {there} parameters, and here are {here}. Nothing "
                    "is loaded."
                )

    def restore(self, value: Any, rank: int, ranks: int) -> None:
        if isinstance(value, list):  # of the ranks that saved, each had a state of its own
            value = value[rank % len(value)]
        # A model in stages has saved the names, because its order may be another one.
        groups = value.get("param_groups")
        if groups and all(NAMES in group for group in groups):
            load_whole_state(self.optimizer, value)
        else:
            load_optimizer_state(self.optimizer, value)

    @property
    def _trained_by(self) -> tuple[int, ...] | None:
        optimizer = self.optimizer
        return tuple(optimizer._hvdlite_driver.process_set.members) if isinstance(optimizer, Distributed) else None

    def have_same_state(self) -> None:
        if isinstance(self.optimizer, Distributed):
            self.optimizer._hvdlite_driver.have_same_state()


def _with_defaults(plain: Any, optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return saved groups with what the class itself adds when it loads: later versions have more than earlier ones."""
    groups: list[dict[str, Any]] = [{**group, "params": []} for group in saved]
    shell: Any = object.__new__(plain)
    vars(shell).update(state={}, param_groups=groups, defaults=dict(optimizer.defaults))
    with contextlib.suppress(AttributeError):  # a class of the program's, which has more attributes
        plain.__setstate__(shell, {"state": {}, "param_groups": groups})
    return groups


class _SplitState(_OptimizerState):
    """The state of an optimizer whose model is split, in stages or slices: each rank has a part of that of the whole model."""

    def snapshot(self, rank: int) -> Snapshot:
        return Snapshot(part_of_whole_state(self.optimizer), on_each_rank=True)

    @property
    def parts_of(self) -> tuple[int, ...]:  # type: ignore[override]
        stages = all_stages(optimizer_parameters(self.optimizer))
        return tuple(rank for each in stages for rank in each.process_set.members)

    def restore(self, value: Any, rank: int, ranks: int) -> None:
        load_whole_state(self.optimizer, value)


class _ShardedState(_OptimizerState):
    """The state of an optimizer with ``shard=True``: each rank saves the state of its pieces of the parameters."""

    def snapshot(self, rank: int) -> Snapshot:
        optimizer = self.optimizer
        parameters = [local_of(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        with optimizer._hvdlite_sharding.without_pieces() as shard:
            found = super(Sharded, optimizer).state_dict()  # type: ignore[misc]
        states = {number: dict(state) for number, state in found["state"].items()}
        for number, start, stop, values in shard.pieces:
            parameter = parameters[number]
            shape = cut(parameter.data, Extent(number, start, stop)).shape
            states.setdefault(number, {}).update(
                {
                    name: TensorPiece(value, start, tuple(parameter.shape))
                    if isinstance(value, torch.Tensor) and value.shape == shape and shape
                    else value
                    for name, (value, _) in values.items()
                }
            )
        return Snapshot({**found, "state": states}, on_each_rank=True, trained_by=self._trained_by)


class _LocalState(_OptimizerState):
    """The state of an optimizer with ``local_steps=``, which each rank has for itself, while the parameters are the same."""

    def snapshot(self, rank: int) -> Snapshot:
        state = self.optimizer.state_dict()
        if state["local_steps"]["steps"]:
            raise ArgumentError(
                "with local_steps= the ranks have different parameters between two meetings: call "
                "optimizer.average_parameters() on all ranks before you save."
            )
        return Snapshot(Own(state), on_each_rank=True, trained_by=self._trained_by)


class _AggregatingState(_OptimizerState):
    """The state of an optimizer with ``aggregator=``: each rank has an aggregator of its own, with an error memory."""

    def snapshot(self, rank: int) -> Snapshot:
        state = self.optimizer.state_dict()
        if "aggregator" not in state:
            return Snapshot(state, trained_by=self._trained_by)
        own = {"aggregator": Own(state["aggregator"])}
        return Snapshot({**state, **own} if rank == 0 else own, on_each_rank=True, trained_by=self._trained_by)

    def restore(self, value: dict[str, Any], rank: int, ranks: int) -> None:
        if "aggregator" in value and isinstance(value["aggregator"], list):
            own = share_of(value["aggregator"], self.optimizer._hvdlite_aggregator, rank, ranks)
            value = {**value, "aggregator": own}
        super().restore(value, rank, ranks)
