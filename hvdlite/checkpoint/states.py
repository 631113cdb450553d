"""Which objects have a state that a checkpoint saves and sets again.

Modules, optimizers and schedules have `state_dict` and `load_state_dict`. What is special of a framework is in its adapter,
which is imported when an object of that framework is seen, so that the core never imports one.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, Protocol

_ADAPTERS = {
    **dict.fromkeys(("torch", "hvdlite_torch"), "hvdlite_torch.checkpoint"),
    **dict.fromkeys(("keras", "tf_keras"), "hvdlite_tf.checkpoint"),
}
"""The module whose ``stateful`` knows the objects of a framework, by the top-level package of their class or of a base."""


class Snapshot(NamedTuple):
    """The state of an object at one moment.

    Attributes:
        value: The state, with tensors in it that may share memory with the object. It may have `TensorPiece` and `Own` in it.
        on_each_rank: Whether each rank has a part of the value, and these are merged. If not, each rank has all of it, and the
            first rank's is saved.
        trained_by: The world ranks that train the object together, if it knows; then those that save must be among the same.
    """

    value: Any
    on_each_rank: bool = False
    trained_by: tuple[int, ...] | None = None


class Stateful(Protocol):
    """An object whose state is saved and set again. All ranks call these methods, with equal objects.

    Attributes:
        parts_of: The world ranks that have the parts of one replica, if each has a part; then all of them save together.
        copies: Whether `restore` copies all tensors that it gets, so that they may be a file that ends then.
    """

    @property
    def parts_of(self) -> tuple[int, ...]: ...

    @property
    def copies(self) -> bool: ...

    def snapshot(self, rank: int) -> Snapshot:
        """Return the object's state.

        Args:
            rank: The number of this rank among those that save.
        """
        ...

    def check(self, value: Any, rank: int, ranks: int) -> None:
        """Raise if `restore` would, as far as that can be told, with the same arguments. Nothing is changed."""
        ...

    def restore(self, value: Any, rank: int, ranks: int) -> None:
        """Set the object's state.

        Args:
            value: The state, which is the same on all ranks. Where `snapshot` had `Own`, it has a list of all ranks' values.
            rank: The number of this rank among those that load.
            ranks: How many ranks load.
        """
        ...

    def have_same_state(self) -> None:
        """Note that the objects of all ranks have been given the same state."""
        ...


class StateDict:
    """An object that has `state_dict` and `load_state_dict`.

    Args:
        target: The object.
    """

    parts_of: tuple[int, ...] = ()
    copies: bool = False

    def __init__(self, target: Any) -> None:
        self._target = target

    def snapshot(self, rank: int) -> Snapshot:
        return Snapshot(self._target.state_dict())

    def check(self, value: Any, rank: int, ranks: int) -> None:
        return

    def restore(self, value: Any, rank: int, ranks: int) -> None:
        self._target.load_state_dict(value)

    def have_same_state(self) -> None:
        return


def stateful(value: Any) -> Stateful | None:
    """Return what saves and sets the state of an object; None if it has none, so that it is itself a value to save.

    Raises:
        ArgumentError: The object has a state that cannot be saved. The text says what to do instead.
    """
    for cls in type(value).__mro__:
        package = cls.__module__.partition(".")[0]
        if package in _ADAPTERS:
            found: Stateful | None = importlib.import_module(_ADAPTERS[package]).stateful(value)
            return found
    both = all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
    return StateDict(value) if both and not isinstance(value, type) else None
