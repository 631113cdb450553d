"""How `TorchState` saves an object, brings it back, and gives all ranks the same: one handler for each kind of object."""

from __future__ import annotations

from typing import Any

import torch

import hvdlite
from hvdlite.checkpoint.memory import Copy, copy_of, restore
from hvdlite.checkpoint.states import StateDict, Stateful
from hvdlite.errors import ArgumentError
from hvdlite_torch.checkpoint import stateful
from hvdlite_torch.elastic.sampler import ElasticSampler
from hvdlite_torch.pipeline.own_layers import OwnLayers
from hvdlite_torch.step.wrapped import Aggregating, Local
from hvdlite_torch.tensors.sliced import is_sliced
from hvdlite_torch.tensors.split import is_split, optimizer_parameters
from hvdlite_torch.training.state import broadcast_optimizer_state, broadcast_parameters


class StateHandler:
    """A handler of one object. Programs make subclasses for other kinds of objects, and add them to the registry.

    Args:
        value: The object.

    Attributes:
        value: The object.

    Examples:
        >>> class OfNumber(hvd.elastic.StateHandler):  # of an object with an attribute `number`
        ...     def save(self): self.number = self.value.number
        ...     def restore(self): self.value.number = self.number
        ...     def sync(self): self.value.number = hvd.broadcast_object(self.value.number)
        >>> import types
        >>> handler = OfNumber(types.SimpleNamespace(number=3))
        >>> handler.save()
        >>> handler.value.number = 4
        >>> handler.restore()
        >>> handler.value.number
        3
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Copy the state of the object to this handler. Every rank calls this."""
        raise NotImplementedError

    def restore(self) -> None:
        """Give the object the state that was saved last. Without that, it stays."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give the objects of all ranks the state of rank 0's. Every rank calls this."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Handle another object from now on, and save it. Every rank calls this.

        Args:
            value: The object.
        """
        self.value = value
        self.save()

    def saved(self) -> dict[str, Any]:
        """Return what `save` has saved, in values that can be pickled: all attributes of the handler but `value`."""
        return {name: value for name, value in vars(self).items() if name != "value"}

    def set_saved(self, saved: dict[str, Any]) -> None:
        """Replace what `save` has saved.

        Args:
            saved: What `saved` has returned, in this process or in one before it.
        """
        vars(self).update(saved)


class StateDictHandler(StateHandler):
    """A handler of an object that has `state_dict` and `load_state_dict`, such as a schedule or a ``GradScaler``.

    Examples:
        >>> def synchronized():
        ...     scaler = torch.amp.GradScaler("cpu", init_scale=2.0 + hvd.rank())
        ...     hvd.elastic.StateDictHandler(scaler).sync()
        ...     return scaler.get_scale()
        >>> on_ranks(2, synchronized)
        [2.0, 2.0]
    """

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._saved: Copy | None = None
        self._is_restored = False

    def save(self) -> None:
        self._saved = copy_of(type(self.value).__name__, self._stateful())
        self._is_restored = False

    def restore(self) -> None:
        if self._saved is not None:
            restore(self._saved, self._stateful())
            self._is_restored = True

    def saved(self) -> dict[str, Any]:
        return {"_saved": self._saved}

    def sync(self) -> None:
        state = hvdlite.broadcast_object(self.value.state_dict(), 0, f"the state of a {type(self.value).__name__}")
        if hvdlite.rank() != 0:
            self.value.load_state_dict(state)

    def _sync_parts(self, whole: bool) -> bool:
        """Give all ranks what rank 0 has brought back, of a state of which ranks have parts. Every rank calls this.

        Args:
            whole: Whether all ranks together have the whole state. If so, they get it if rank 0 has brought nothing back.

        Returns:
            Whether they have been given a state.
        """
        what = f"the state of a {type(self.value).__name__}"
        saved = hvdlite.broadcast_object(self._saved if self._is_restored else None, 0, what)
        if saved is None and whole:
            saved = copy_of(type(self.value).__name__, self._stateful())
        if saved is not None:
            restore(saved, self._stateful())
        if saved is not None and whole:
            self._stateful().have_same_state()
        return saved is not None

    def _stateful(self) -> Stateful:
        return stateful(self.value) or StateDict(self.value)


class ModelStateHandler(StateDictHandler):
    """A handler of a module, or of a model in stages, such as a `Pipeline`.

    Args:
        model: The module.

    Examples:
        >>> def synchronized():
        ...     layer = torch.nn.Linear(1, 1)
        ...     torch.nn.init.constant_(layer.weight, 5 + hvd.rank())
        ...     hvd.elastic.ModelStateHandler(layer).sync()
        ...     return layer.weight.item()
        >>> on_ranks(2, synchronized)
        [5.0, 5.0]
    """

    def __init__(self, model: torch.nn.Module | OwnLayers) -> None:
        super().__init__(model)

    def sync(self) -> None:
        if isinstance(self.value, OwnLayers) or any(map(is_sliced, self.value.parameters())):
            self._sync_parts(whole=True)
        else:
            broadcast_parameters(self.value)


class OptimizerStateHandler(StateDictHandler):
    """A handler of an optimizer. With ``shard=True`` every rank saves the whole state, so that losing a rank loses nothing.

    Args:
        optimizer: The optimizer.

    Examples:
        >>> def synchronized():
        ...     optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1 if hvd.rank() == 0 else 0.9)
        ...     hvd.elastic.OptimizerStateHandler(optimizer).sync()
        ...     return optimizer.param_groups[0]["lr"]
        >>> on_ranks(2, synchronized)
        [0.1, 0.1]
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)

    def sync(self) -> None:
        if is_split(optimizer_parameters(self.value)):
            self._sync_parts(whole=True)
            return
        # Ranks whose aggregators remember something of their own get theirs back, as rank 0 has it in what was saved.
        if isinstance(self.value, Aggregating | Local) and self._sync_parts(whole=False):
            return
        broadcast_optimizer_state(self.value)


class SamplerStateHandler(StateHandler):
    """A handler of an `ElasticSampler`.

    Args:
        sampler: The sampler.

    Examples:
        >>> def left():
        ...     sampler = hvd.elastic.ElasticSampler(range(6), shuffle=False)
        ...     sampler.record_batch(0, 1)  # each rank has trained with one sample
        ...     hvd.elastic.SamplerStateHandler(sampler).sync()
        ...     return list(sampler)
        >>> on_ranks(2, left)
        [[2, 4], [3, 5]]
    """

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler)
        self._saved: dict[str, Any] | None = None

    def save(self) -> None:
        """Copy what all ranks have seen."""
        self._saved = self.value.gathered()

    def restore(self) -> None:
        """Go on after the samples that had been seen when `save` was called, with the ranks that are there now."""
        if self._saved is not None:
            self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        """Go on in the epoch of rank 0, after the samples that any rank has seen in it."""
        self.value.load_state_dict(self.value.gathered())


Registry = list[tuple[type[Any], type[StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (OwnLayers, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, StateDictHandler),
    (torch.amp.GradScaler, StateDictHandler),
]


def get_handler_registry() -> Registry:
    """Return the registry: pairs of a class, and of the handler of its objects. The first pair that fits an object counts.

    Examples:
        >>> dict(hvd.elastic.get_handler_registry())[torch.nn.Module].__name__
        'ModelStateHandler'
    """
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the registry, for all states that are made afterwards.

    Args:
        registry: See `get_handler_registry`.

    Raises:
        ArgumentError: It is no list of such pairs.

    Examples:
        >>> registry = hvd.elastic.get_handler_registry()
        >>> hvd.elastic.set_handler_registry([*registry, (torch.optim.swa_utils.AveragedModel, hvd.elastic.ModelStateHandler)])
        >>> len(hvd.elastic.get_handler_registry()) - len(registry)
        1
        >>> hvd.elastic.set_handler_registry(registry)
    """
    global _registry
    pairs = list(registry)
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], type) for pair in pairs):
        raise ArgumentError("set_handler_registry: expected pairs of a class and of a handler's class.")
    _registry = pairs


def handler_of(value: Any) -> StateHandler | None:
    """Return a handler of an object; None if no kind of handler is registered for it."""
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)
