"""`LocalSync`: each rank makes steps of its own, and every few steps all ranks bring their parameters together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hvdlite.adapter.few_bytes.local_steps import OUTER_MOMENTUM, OUTER_RATE, DiLoCo, LocalSGD, Rounds
from hvdlite.errors import ArgumentError
from hvdlite_torch.step.context import OptimizerContext
from hvdlite_torch.sync.whole import OwnSteps


class LocalSync(OwnSteps):
    """The `GradientSync` of `LocalSGD` and `DiLoCo`.

    Args:
        context: The optimizer.
        how: When the ranks meet, and what they do then.

    Raises:
        ArgumentError: An argument is set that needs combined gradients, or the outer optimizer is no function.
    """

    def __init__(self, context: OptimizerContext, how: LocalSGD) -> None:
        for name in ("overlap", "max_grad_norm"):
            value = getattr(context.options, name)
            if value:
                raise ArgumentError(
                    f"{name}={value!r} has no meaning for local_steps={how}: gradients are not combined. To clip this rank's "
                    "own gradients, call torch.nn.utils.clip_grad_norm_ before the step."
                )
        if isinstance(how, DiLoCo) and how.outer is not None and not callable(how.outer):
            raise ArgumentError(
                f"DiLoCo: outer={type(how.outer).__name__}: expected a function that makes an optimizer of a list of "
                "parameters, such as lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)."
            )
        super().__init__(context)
        self._how = how
        self._rounds = Rounds(how, context.process_set, context.options.codec)
        self._stepped: list[int] = []
        """The parameters of the outer optimizer, by their ``id``."""
        self._start: list[torch.nn.Parameter] = []
        """For an outer optimizer, the parameters that it steps: those with which all ranks went on."""
        self._outer: torch.optim.Optimizer | None = None

    @torch.no_grad()
    def before_step(self) -> None:
        self._context.check_in_effect()
        is_set = self._context.step.weight.is_set
        self._rounds.weigh(self._context.take_weight(), is_set)
        if isinstance(self._how, DiLoCo) and self._outer is None:
            self._begin_outer(self._how, [parameter.detach().clone() for parameter in self._context.trained()])

    def _begin_outer(self, how: DiLoCo, start: list[torch.Tensor]) -> torch.optim.Optimizer:
        """Make the outer optimizer, which steps `start`, and return it."""
        self._stepped = [id(parameter) for parameter in self._context.trained()]
        self._start = [torch.nn.Parameter(tensor) for tensor in start]
        if how.outer is None:
            self._outer = torch.optim.SGD(self._start, OUTER_RATE, OUTER_MOMENTUM, nesterov=True)
        else:
            self._outer = how.outer(self._start)
        return self._outer

    @torch.no_grad()
    def after_step(self) -> None:
        if self._rounds.count():
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Bring the parameters of all ranks together now. Every rank calls this, after as many steps.

        Raises:
            MismatchError, HvdliteError: See `Rounds.meet`.
            ArgumentError: Parameters were frozen or added since the outer optimizer was made.
        """
        parameters = self._context.trained()
        if not self._rounds.pending:
            return
        if self._outer is not None and self._stepped != [id(parameter) for parameter in parameters]:
            raise ArgumentError(
                "DiLoCo: parameters were frozen or added since its outer optimizer was made. Make the distributed "
                "optimizer anew."
            )
        found = self._rounds.meet(parameters, [start.detach() for start in self._start])
        if self._outer is not None:
            for start, gradient in zip(self._start, found, strict=True):
                start.grad = gradient
            with torch.enable_grad():
                self._outer.step()
            for start in self._start:
                start.grad = None
            found = list(self._start)
        for parameter, value in zip(parameters, found, strict=True):
            parameter.copy_(value)

    def state(self) -> dict[str, Any]:
        """Return the state: the steps that this rank has made by itself; of an outer optimizer, its parameters and state."""
        state = self._rounds.state()
        if self._outer is not None:
            state["start"] = [start.detach().clone() for start in self._start]
            state["outer"] = self._outer.state_dict()
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a state that `state` has returned."""
        self._rounds.load(state)
        self._start, self._outer = [], None
        if isinstance(self._how, DiLoCo) and "outer" in state:
            pairs = zip(state["start"], self._context.trained(), strict=True)
            outer = self._begin_outer(self._how, [start.detach().clone().to(p.device) for start, p in pairs])
            outer.load_state_dict(state["outer"])
