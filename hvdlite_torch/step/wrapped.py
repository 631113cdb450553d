"""`Distributed`: the methods that a distributed optimizer has besides those of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from hvdlite.errors import ArgumentError
from hvdlite.gradients.lossy.names import LOSSY
from hvdlite_torch.step.driver import StepDriver
from hvdlite_torch.step.sharding import Sharding

Opt = TypeVar("Opt", bound=torch.optim.Optimizer)


class Distributed:
    """The methods that `DistributedOptimizer` adds to an optimizer's class.

    Examples:
        >>> def step():
        ...     weight = torch.nn.Parameter(torch.zeros(1))
        ...     optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        ...     x = torch.tensor([[1.0], [2.0, 3.0]][hvd.rank()])  # rank 1 has two samples
        ...     optimizer.set_batch_weight(len(x))
        ...     (weight * x).mean().backward()
        ...     optimizer.step()
        ...     return weight.item()
        >>> on_ranks(2, step)  # the mean of 1, 2 and 3
        [-2.0, -2.0]
    """

    _hvdlite_driver: StepDriver
    _hvdlite_plain: type[torch.optim.Optimizer]
    _hvdlite_names: Mapping[int, str]

    def set_batch_weight(self, weight: float) -> None:
        """Set the number of samples in this rank's batch, for the next step only; 1 if it is not set.

        Ranks with different numbers of samples (even 0, without a backward pass) then get the gradient of the joint batch. If
        the weight is set before `backward`, gradients can travel early.

        Args:
            weight: The number of samples, 0 or more.

        Raises:
            ArgumentError: The weight is negative, or gradients are not averaged.
        """
        self._hvdlite_driver.set_weight(weight)

    def synchronize(self) -> None:
        """Combine the gradients now, so that the program can read or change the result. The next `step` does not combine.

        Raises:
            ArgumentError: The optimizer is sharded.
        """
        self._hvdlite_driver.synchronize()

    def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager: a `step` in its body does not combine gradients.

        After `synchronize` this is not needed: the next step does not combine anyway.

        Raises:
            ArgumentError: The optimizer is sharded.
        """
        return self._hvdlite_driver.skip()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager: backward passes in its body are not the last ones before `step`.

        The gradients of such passes need not be copied. The result is right without this too: `step` combines gradients,
        however many passes there were.
        """
        return self._hvdlite_driver.quiet()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the argument ``backward_passes_per_step`` of `DistributedOptimizer`.

        Args:
            passes: The largest number of backward passes before a step; 1 for any number.

        Raises:
            ArgumentError: `passes` is less than 1.
        """
        self._hvdlite_driver.set_passes(passes)

    def average_parameters(self) -> None:
        """Bring the parameters of all ranks together, if the optimizer was made with ``local_steps=``.

        Raises:
            ArgumentError: It was made without, so that the parameters of all ranks are equal after each step.
        """
        raise ArgumentError("average_parameters() is for optimizers that are made with local_steps=.")

    def _hvdlite_before_unscale(self) -> None:
        self._hvdlite_driver.before_unscale()

    def _hvdlite_after_unscale(self, infinities: Iterable[torch.Tensor]) -> None:
        self._hvdlite_driver.after_unscale(infinities)

    def __reduce__(self) -> tuple[Any, ...]:
        # An optimizer is pickled and copied as a plain one: the driver belongs to this process.
        state = self.__getstate__()  # type: ignore[attr-defined]
        return _blank, (self._hvdlite_plain,), {k: v for k, v in state.items() if not k.startswith("_hvdlite")}


class Aggregating(Distributed):
    """The methods that ``aggregator=`` adds to an optimizer's class: its state includes the state of the aggregator."""

    _hvdlite_aggregator: Any

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer and, as ``"aggregator"``, the state of this rank's aggregator, if it has one."""
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        if hasattr(self._hvdlite_aggregator, "state_dict"):
            state["aggregator"] = self._hvdlite_aggregator.state_dict()
            if isinstance(self._hvdlite_aggregator, LOSSY):
                state["aggregator"] = _as_tensors(state["aggregator"])
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the optimizer, and the state of the aggregator if `state_dict` has one."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        if "aggregator" in state_dict:
            self._hvdlite_aggregator.load_state_dict(state_dict["aggregator"])


class Local(Distributed):
    """The methods that ``local_steps=`` adds to an optimizer's class."""

    def average_parameters(self) -> None:
        """Bring the parameters of all ranks together now, before the program evaluates or saves. Every rank calls this.

        All ranks must have made as many steps. The next steps are counted from here.
        """
        self._hvdlite_driver.sync.average()  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's optimizer and, as ``"local_steps"``, of what brings the ranks together."""
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        state["local_steps"] = self._hvdlite_driver.sync.state()  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the optimizer, and of what brings the ranks together if `state_dict` has it."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        if "local_steps" in state_dict:
            self._hvdlite_driver.sync.load(state_dict["local_steps"])  # type: ignore[attr-defined]


class Sharded(Distributed):
    """The methods that ``shard=True`` adds to an optimizer's class."""

    @property
    def _hvdlite_sharding(self) -> Sharding:
        sharding = self._hvdlite_driver.sharding
        assert sharding is not None
        return sharding

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, as an optimizer that is not sharded has it. Every rank calls this."""
        with self._hvdlite_sharding.whole_state():
            return super().state_dict()  # type: ignore[misc, no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state, which any number of ranks may have saved.

        Every rank calls this with the same state. Or one rank calls this, and then all ranks call
        `broadcast_optimizer_state` with that rank as root before the next step.
        """
        with self._hvdlite_sharding.loading():
            super().load_state_dict(state_dict)  # type: ignore[misc]

    def __reduce__(self) -> tuple[Any, ...]:
        raise ArgumentError(
            "a sharded optimizer cannot be copied or pickled: each rank has its share. Use state_dict()."
        )


def _as_tensors(state: Any) -> Any:
    """Return state with tensors in place of arrays, which ``torch.load`` takes without more trust in a file."""
    if isinstance(state, dict):
        return {name: _as_tensors(value) for name, value in state.items()}
    return torch.from_numpy(state) if isinstance(state, np.ndarray) else state


def add_to_class(optimizer: torch.optim.Optimizer, mixin: type, **members: Any) -> None:
    """Give one optimizer `members` and the methods of `mixin`, before those of its class. The class keeps its name."""
    plain = type(optimizer)
    # The class has the same name, so a program that prints or saves it sees what the user wrote.
    about = {"__module__": plain.__module__, "__doc__": plain.__doc__}
    optimizer.__class__ = type(plain.__name__, (*_anchor(plain), mixin, plain), {**about, **members})


def _anchor(plain: type) -> tuple[type, ...]:
    """Return the bases that must come first, so that Python lets an object of `plain` change to the new class.

    Both classes must have the same memory layout by way of their first bases. That fails for optimizers whose first base is
    a class without instance attributes, such as ABC. Then another child of that class goes first.
    """
    root = plain
    while root.__base__ is not None and root.__base__.__dictoffset__:
        root = root.__base__
    bare = root.__base__
    return () if bare is None or bare is object else (type("_Anchor", (bare,), {}),)


def _blank(cls: type[Opt]) -> Opt:
    return cls.__new__(cls)
