"""One exchange a step, however often the optimizer's step hooks run in it.

torch wraps the `step` of each class of optimizers, so a ``step`` that calls ``super().step()`` runs all hooks twice. What goes
on around a step of a distributed optimizer must go on once: an exchange of what is combined already is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Before = Callable[[torch.optim.Optimizer, Any, Any], tuple[Any, Any] | None]
After = Callable[[torch.optim.Optimizer, Any, Any], None]


class StepGuard:
    """Knows the outermost step of one optimizer from those within it.

    Args:
        before: What goes on before a step, as a step hook of torch.
        after: What goes on after a step, as a step hook of torch.

    Attributes:
        inside: A step goes on.
    """

    def __init__(self, before: Before, after: After) -> None:
        self._before = before
        self._after = after
        self.inside = False
        self._depth = 0
        """Of steps whose hooks have run, within the outermost. It says nothing outside."""
        self._owed: Callable[[], None] | None = None
        """What goes on after the outermost step, until it has."""

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the optimizer call this at each step, before its other hooks.

        Those (clipping, logging) are to see the combined gradients and the new parameters, those registered before too.
        """
        # An optimizer's step may be compiled, too: what goes on around it is not.
        plain = torch.compiler.disable
        before = optimizer.register_step_pre_hook(plain(self._enter))  # type: ignore[no-untyped-call]
        after = optimizer.register_step_post_hook(plain(self._leave))  # type: ignore[no-untyped-call]
        optimizer._optimizer_step_pre_hooks.move_to_end(before.id, last=False)  # type: ignore[attr-defined]
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]
        if "step" in vars(optimizer):  # a scheduler's, which knows the class that the optimizer had
            step = optimizer.step
            guarded = functools.wraps(step)(functools.partial(self.run, step))
            optimizer.step = guarded  # type: ignore[method-assign]

    def run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `step`, which is the outermost one unless another goes on."""
        if self.inside:
            return step(*args, **kwargs)
        self.inside, self._depth, self._owed = True, 0, None
        try:
            result = step(*args, **kwargs)
            if self._owed is not None:  # a step within has failed, and the outermost has caught that
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
    """The `step` of a distributed optimizer's class: that of its plain class, which it wraps."""
    if not getattr(step, "hooked", False):  # of a class that torch has not met: hooks are for this object alone
        step = torch.optim.Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._hvdlite_driver.guard.run(step, self, *args, **kwargs)

    return hooked(run)


def hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a `step` that calls one whose hooks torch runs: torch would wrap it, too, when it loads a state."""
    step.hooked = True  # type: ignore[attr-defined]
    return step
