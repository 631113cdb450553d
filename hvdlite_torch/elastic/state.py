"""`TorchState`: what a training with torch commits, and goes on from."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite.elastic import ObjectState
from hvdlite.errors import CommitError, HvdliteError
from hvdlite_torch.elastic.handlers import SamplerStateHandler, StateHandler, handler_of


class TorchState(ObjectState):
    """The state of a training with torch: models, optimizers, schedules, samplers; and Python's objects, such as numbers.

    They are attributes of the state under their names: ``state.model``, ``state.epoch``. Models and the like stay the objects
    that they are; `restore` and `sync` set their states. All ranks call `save`.

    Args:
        model: A module.
        optimizer: An optimizer, distributed or not.
        kwargs: More of them by name: modules, optimizers, `ElasticSampler`, schedules, ``GradScaler``, and what else is in the
            registry (`get_handler_registry`); and values of any other kind, which are copied.

    Raises:
        ArgumentError: An attribute has the name of something else that a state has.

    Examples:
        >>> def interrupted():
        ...     layer = torch.nn.Linear(1, 1)
        ...     state = hvd.elastic.TorchState(layer, epoch=3)
        ...     torch.nn.init.ones_(layer.weight)
        ...     state.commit()
        ...     torch.nn.init.zeros_(layer.weight)  # and here something fails
        ...     state.restore()
        ...     return layer.weight.item(), state.epoch
        >>> on_ranks(2, interrupted)
        [(1.0, 3), (1.0, 3)]
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        self._handlers: dict[str, StateHandler] = {}
        given = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {name: handler for name, value in given.items() if (handler := handler_of(value)) is not None}
        super().__init__(**{name: None if name in handlers else value for name, value in given.items()})
        self._names = tuple(name for name in self._names if name not in handlers)
        for name, handler in handlers.items():
            setattr(self, name, handler.value)
        self._handlers = handlers

    def __setattr__(self, name: str, value: Any) -> None:
        handlers: dict[str, StateHandler] = vars(self).get("_handlers", {})
        if name in handlers and handlers[name].value is not value:
            handlers[name].set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Copy everything to host memory. Every rank calls this.

        Raises:
            CommitError: Something cannot be copied. The error names it.
        """
        for name, handler in self._handlers.items():
            try:
                handler.save()
            except HvdliteError as error:
                raise CommitError(f"the attribute {name!r} of the state cannot be saved: {error}") from error
        super().save()

    def restore(self) -> None:
        """Bring everything back to what it was when `save` was called. Without that, it stays."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Give all ranks the state of rank 0, and save it."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def saved(self) -> dict[str, Any]:
        """Return what `save` has saved: the attributes, and what each handler has saved."""
        return {"attributes": super().saved(), "handled": {name: each.saved() for name, each in self._handlers.items()}}

    def set_saved(self, saved: dict[str, Any]) -> None:
        """Replace what `save` has saved.

        Args:
            saved: What `saved` has returned.

        Raises:
            HvdliteError: The names are others than those of this state: the program has changed.
        """
        super().set_saved(saved["attributes"])
        if saved["handled"].keys() != self._handlers.keys():
            raise HvdliteError(
                f"the committed state has {sorted(saved['handled'])}, and this program's state has {sorted(self._handlers)}."
            )
        for name, handler in self._handlers.items():
            handler.set_saved(saved["handled"][name])

    def reset(self) -> None:
        """Let samplers deal out what is left to the ranks that are there now."""
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.value.reset()
