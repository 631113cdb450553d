"""`StepGuard` makes sure that gradients are combined once per step, however often the optimizer's step hooks run in it.

torch wraps the `step` of each optimizer class, so a ``step`` that calls ``super().step()`` runs all hooks twice. The work
around a step of a distributed optimizer must be done once: combined gradients must not be combined again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Before = Callable[[torch.optim.Optimizer, Any, Any], tuple[Any, Any] | None]
After = Callable[[torch.optim.Optimizer, Any, Any], None]


class StepGuard:
    """Tells the outermost step of one optimizer from the steps within it.

    Args:
        before: A step pre-hook of torch, which runs before the outermost step.
        after: A step post-hook of torch, which runs after the outermost step.

    Attributes:
        inside: Whether a step is running.
    """

    def __init__(self, before: Before, after: After) -> None:
        self._before = before
        self._after = after
        self.inside = False
        self._depth = 0
        """How many steps within the outermost one have run their pre-hooks. It has no meaning outside of a step."""
        self._owed: Callable[[], None] | None = None
        """The call of `after` that the outermost step still has to make; None if it has made it."""

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the optimizer call this object at each step, before its other hooks.

        The other hooks (clipping, logging), even earlier ones, see the combined gradients and the new parameters.
        """
        # A program may compile an optimizer's step. The work around it is not compiled.
        plain = torch.compiler.disable
        before = optimizer.register_step_pre_hook(plain(self._enter))  # type: ignore[no-untyped-call]
        after = optimizer.register_step_post_hook(plain(self._leave))  # type: ignore[no-untyped-call]
        optimizer._optimizer_step_pre_hooks.move_to_end(before.id, last=False)  # type: ignore[attr-defined]
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]
        if "step" in vars(optimizer):  # a scheduler has set it, and it calls the `step` of the earlier class
            step = optimizer.step
            guarded = functools.wraps(step)(functools.partial(self.run, step))
            optimizer.step = guarded  # type: ignore[method-assign]

    def run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `step`. It is the outermost step unless another one is running."""
        if self.inside:
            return step(*args, **kwargs)
        self.inside, self._depth, self._owed = True, 0, None
        try:
            result = step(*args, **kwargs)
            if self._owed is not None:  # a step within has raised, and the outermost one has caught the error
                self._owed()
            return result
        finally:
            self.inside = False
            self._owed = None

    def _enter(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self.inside:
            self._depth += 1
            if self._depth > 1:
                return None
            self._owed = functools.partial(self._after, optimizer, args, kwargs)
        return self._before(optimizer, args, kwargs)

    def _leave(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.inside:
            self._depth -= 1
            if self._depth > 0:
                return
            self._owed = None
        self._after(optimizer, args, kwargs)


def guarded(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `step` of a distributed optimizer's class. It wraps the `step` of the plain class."""
    if not getattr(step, "hooked", False):  # torch has not wrapped this class yet
        step = torch.optim.Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._hvdlite_driver.guard.run(step, self, *args, **kwargs)

    return hooked(run)


def hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a `step` whose hooks run already, so that torch does not wrap it again when it loads a state."""
    step.hooked = True  # type: ignore[attr-defined]
    return step
