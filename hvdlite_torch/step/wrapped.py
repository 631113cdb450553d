"""What a distributed optimizer's class has that torch's has not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, TypeVar

import torch

from hvdlite.errors import ArgumentError
from hvdlite_torch.step.driver import StepDriver
from hvdlite_torch.step.sharding import Sharding

Opt = TypeVar("Opt", bound=torch.optim.Optimizer)


class Distributed:
    """What `DistributedOptimizer` adds to an optimizer's class."""

    _hvdlite_driver: StepDriver
    _hvdlite_plain: type[torch.optim.Optimizer]

    def set_batch_weight(self, weight: float) -> None:
        """Say how many samples this rank's gradients are the mean of, for the next step only; 1 unless said.

        Ranks with different numbers of samples (0 too, without a backward pass) then get the gradient of the joined batch.
        Said before `backward`, it lets gradients travel early.

        Raises:
            ArgumentError: A negative weight, or the gradients are not averaged.
        """
        self._hvdlite_driver.set_weight(weight)

    def synchronize(self) -> None:
        """Exchange the gradients now, to see or change the combined ones; the next `step` will not."""
        self._hvdlite_driver.synchronize()

    def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
        """For a with statement: a `step` within does not exchange.

        Not needed after `synchronize`, after which the next step does not exchange anyway.
        """
        return self._hvdlite_driver.skip()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """For a with statement: backward passes within are not the last before `step`. Spares them copying gradients.

        Not needed for a right result: gradients are exchanged by `step`, however many passes there were.
        """
        return self._hvdlite_driver.quiet()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change what `DistributedOptimizer` was told of that name.

        Raises:
            ArgumentError: It is less than 1.
        """
        self._hvdlite_driver.set_passes(passes)

    def _hvdlite_before_unscale(self) -> None:
        self._hvdlite_driver.before_unscale()

    def _hvdlite_after_unscale(self, infinities: Iterable[torch.Tensor]) -> None:
        self._hvdlite_driver.after_unscale(infinities)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled and copied as the plain optimizer: the driver belongs to this process.
        state = self.__getstate__()  # type: ignore[attr-defined]
        return _blank, (self._hvdlite_plain,), {k: v for k, v in state.items() if not k.startswith("_hvdlite")}


class Aggregating(Distributed):
    """What `DistributedOptimizer` with ``aggregator=`` adds to an optimizer's class: the aggregator's state is in its own."""

    _hvdlite_aggregator: Any

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer and, as ``"aggregator"``, that of this rank's aggregator, if it has one."""
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        if hasattr(self._hvdlite_aggregator, "state_dict"):
            state["aggregator"] = self._hvdlite_aggregator.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; that of the aggregator, too, if it is there."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        if "aggregator" in state_dict:
            self._hvdlite_aggregator.load_state_dict(state_dict["aggregator"])


class Sharded(Distributed):
    """What `DistributedOptimizer` with ``shard=True`` adds to an optimizer's class."""

    @property
    def _hvdlite_sharding(self) -> Sharding:
        sharding = self._hvdlite_driver.sharding
        assert sharding is not None
        return sharding

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as an optimizer that is not sharded has it. Every rank calls this."""
        with self._hvdlite_sharding.whole_state():
            return super().state_dict()  # type: ignore[misc, no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state, from any number of ranks.

        Every rank calls this, with the same; or one does, and all call `broadcast_optimizer_state` with it as root before the
        next step.
        """
        with self._hvdlite_sharding.loading():
            super().load_state_dict(state_dict)  # type: ignore[misc]

    def __reduce__(self) -> tuple[Any, ...]:
        raise ArgumentError(
            "a sharded optimizer cannot be copied or pickled: each rank has its share. Use state_dict()."
        )


def add_to_class(optimizer: torch.optim.Optimizer, mixin: type, **members: Any) -> None:
    """Let this one object have `members`, and the methods of `mixin`, before those of its class, whose name it keeps."""
    plain = type(optimizer)
    # Same name, so that whoever prints or saves the class sees what the user wrote.
    about = {"__module__": plain.__module__, "__doc__": plain.__doc__}
    optimizer.__class__ = type(plain.__name__, (*_anchor(plain), mixin, plain), {**about, **members})


def _anchor(plain: type) -> tuple[type, ...]:
    """What must come first among the bases, so that Python lets an object of `plain` change to the new class.

    The two must have the same layout by way of their first bases. That fails for optimizers whose first base is a class
    without instance attributes, such as ABC; then another child of it goes first.
    """
    root = plain
    while root.__base__ is not None and root.__base__.__dictoffset__:
        root = root.__base__
    bare = root.__base__
    return () if bare is None or bare is object else (type("_Anchor", (bare,), {}),)


def _blank(cls: type[Opt]) -> Opt:
    return cls.__new__(cls)
