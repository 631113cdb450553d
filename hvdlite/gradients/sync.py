"""The contract between "a backward pass has gradients" and "all ranks step with the same".

One object on each rank does it for one model: it combines gradients before a step, or changes of parameters after it. It
knows nothing of closures, clipping, scaled losses or skipped steps: that is what drives it, a framework's step. So a new way
to train on several ranks is one class with these methods, of which most do nothing::

                        ready           combine              before_step        after_step
    gradients           copy early      sum over ranks       –                  –
    sharded             copy early      sum of own shard     –                  bring the new shard to all ranks
    Adasum              –               –                    keep parameters    combine their changes
    local SGD, DiLoCo   –               –                    –                  every k steps: average parameters
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Protocol


class StepsWith(enum.Enum):
    """What a rank's optimizer steps with."""

    ALL = "the combined gradients of all parameters"
    SHARD = "the combined gradients of this rank's shard of the parameters"
    OWN = "the gradients that this rank has computed"


class Results(Protocol):
    """The combined gradients that one rank steps with: of all parameters, or of its shard.

    Attributes:
        total_weight: The sum of the weights of all ranks, in the last step in which this rank stood in.
    """

    @property
    def total_weight(self) -> float: ...

    def gradients(self) -> list[Any]:
        """The gradients that the step will use."""
        ...

    def clip(self, max_norm: float) -> None:
        """Scale the gradients so that their norm over all parameters is at most `max_norm`. Every rank calls this."""
        ...

    def give(self, there: Sequence[bool]) -> None:
        """Let what is stepped have its gradients.

        Args:
            there: For each parameter, whether any rank has a gradient of it; where none has, there is none.
        """
        ...

    def publish(self) -> None:
        """The optimizer has made its step: let all ranks have what it has made. Every rank calls this."""
        ...


class GradientSync(Protocol):
    """What one rank does so that all ranks train one model.

    All ranks call each method but `ready` and `leave` at the same point of the program.

    Attributes:
        results: What the optimizer steps with.
        missed: Some rank has missed a step since all had the same state, as far as this is known: then all ranks know the same.
    """

    @property
    def results(self) -> Results: ...

    @property
    def missed(self) -> bool: ...

    def begin(self) -> None:
        """Make memory, channels and hooks in the present world."""
        ...

    def make_hooks(self) -> None:
        """Have a framework call `ready`: after each backward pass, for all parameters if the step has to count all."""
        ...

    def ready(self, index: int, parameter: Any) -> None:
        """A backward pass has added to the gradient of parameter `index`."""
        ...

    def combine(self) -> None:
        """Let each parameter that is stepped have its combined gradient, or none if no rank has one."""
        ...

    def leave_out(self) -> None:
        """A step is made without `combine`, as the program wants it."""
        ...

    def changed_unseen(self, how: str) -> None:
        """This rank's gradients have been changed in a way that a framework does not tell.

        Args:
            how: In words, for messages.
        """
        ...

    def before_step(self) -> None:
        """The optimizer is about to step."""
        ...

    def after_step(self) -> None:
        """The optimizer has made its step."""
        ...

    def stand_in(self) -> list[bool] | None:
        """This rank has no data: take part in one step of the others with nothing.

        Returns:
            For each parameter, whether any rank has a gradient of it; empty if the others' step has failed, or is put off; None
            if all ranks have run out of data.
        """
        ...

    def have_same_state(self) -> None:
        """All ranks have been given the same parameters and state."""
        ...

    def leave(self) -> None:
        """Hold nothing of the world any more: it has ended. `begin` is called in the next one."""
        ...
