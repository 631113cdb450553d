"""`LocalSync`: each rank makes steps of its own, and every few steps all ranks bring their parameters together."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import hvdlite
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from hvdlite_torch.step.context import OptimizerContext
from hvdlite_torch.step.local_steps import DiLoCo, LocalSGD
from hvdlite_torch.sync.own_steps import OwnSteps

_MARKS = 2**20
"""How many different checksums there are: sums of their squares must be exact in float64."""


class LocalSync(OwnSteps):
    """The `hvdlite.gradients.sync.GradientSync` of `LocalSGD` and `DiLoCo`.

    Args:
        context: The optimizer.
        how: When the ranks meet, and what they do then.

    Raises:
        ArgumentError: An argument is set that needs combined gradients.
    """

    def __init__(self, context: OptimizerContext, how: LocalSGD) -> None:
        for name in ("overlap", "max_grad_norm"):
            value = getattr(context.options, name)
            if value:
                raise ArgumentError(
                    f"{name}={value!r} has no meaning for local_steps={how}: gradients are not combined. To clip this rank's "
                    "own gradients, call torch.nn.utils.clip_grad_norm_ before the step."
                )
        if context.options.codec is not None and not isinstance(how, DiLoCo):
            raise ArgumentError(
                f"compression={context.options.codec.name} and local_steps={how} do not go together: parameters would be "
                "rounded. DiLoCo can compress, because it sends how far the parameters have moved."
            )
        super().__init__(context)
        self._how = how
        self._steps = 0
        """The steps of this rank since the ranks have last met."""
        self._samples, self._weighted = 0.0, False
        """The weights of the batches of these steps, and whether the program has said any."""
        self._stepped: list[int] = []
        """The parameters of the outer optimizer, by their ``id``."""
        self._start: list[torch.nn.Parameter] = []
        """For an outer optimizer, the parameters that it steps: those with which all ranks went on."""
        self._outer: torch.optim.Optimizer | None = None

    @torch.no_grad()
    def before_step(self) -> None:
        self._context.check_in_effect()
        self._weighted = self._weighted or self._context.step.weight.is_set
        self._samples += self._context.take_weight()
        if isinstance(self._how, DiLoCo) and self._outer is None:
            self._begin_outer(self._how, [parameter.detach().clone() for parameter in self._context.trained()])

    def _begin_outer(self, how: DiLoCo, start: list[torch.Tensor]) -> torch.optim.Optimizer:
        """Make the outer optimizer, which steps `start`, and return it."""
        self._stepped = [id(parameter) for parameter in self._context.trained()]
        self._start = [torch.nn.Parameter(tensor) for tensor in start]
        self._outer = how.outer(self._start)
        return self._outer

    @torch.no_grad()
    def after_step(self) -> None:
        self._steps += 1
        if self._steps >= self._how.every:
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Bring the parameters of all ranks together now. Every rank calls this, after as many steps.

        Raises:
            MismatchError: The ranks went on from different parameters, or only some said weights. All ranks raise it.
            ArgumentError: Parameters were frozen or added since the outer optimizer was made.
            HvdliteError: The weights of all ranks are 0.
        """
        parameters = self._context.trained()
        if not self._steps:
            return
        share, codec = self._share(parameters), self._context.options.codec
        if self._outer is None:
            sent = [(parameter * share, None) for parameter in parameters]
        else:  # the outer gradient: small numbers, which lose little if they are rounded
            sent = [((start - after) * share, None) for start, after in zip(self._start, parameters, strict=True)]
        if codec is not None:
            sent = [codec.encode(value) for value, _ in sent]
        process_set = self._context.process_set
        found = hvdlite.allreduce(
            [value for value, _ in sent], hvdlite.Sum, "optimizer.local_steps", process_set=process_set
        )
        if codec is not None:
            found = [codec.decode(value, context) for value, (_, context) in zip(found, sent, strict=True)]
        self._steps, self._samples, self._weighted = 0, 0.0, False
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

    def _share(self, parameters: list[torch.Tensor]) -> float:
        """Return this rank's part of all samples, after the ranks have compared where they began."""
        if self._outer is not None and self._stepped != [id(parameter) for parameter in parameters]:
            raise ArgumentError(
                "DiLoCo: parameters were frozen or added since its outer optimizer was made. Make the distributed "
                "optimizer anew."
            )
        mark = 0
        for start in self._start:
            flat: Any = start.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            mark = zlib.crc32(flat, mark)
        mark %= _MARKS
        told = np.array([self._samples, self._weighted, 1, mark, mark * mark], np.float64)
        name, process_set = "optimizer.local_steps.told", self._context.process_set
        # A rank that has joined counts nothing.
        samples, weighted, count, total, squares = hvdlite.allreduce(
            told, hvdlite.Sum, name, process_set=process_set
        ).tolist()
        if count * squares != total * total:  # a mean of squares is the square of the mean if the marks are equal
            raise MismatchError(
                "DiLoCo: the ranks went on from different parameters. Begin with hvd.broadcast_parameters(model, 0); after "
                "loading a checkpoint on one rank, call hvd.broadcast_optimizer_state(optimizer, that_rank), too."
            )
        if weighted not in (0, count):
            raise MismatchError(
                f"{weighted:.0f} of {count:.0f} ranks have set batch weights. Either all ranks call set_batch_weight, or none."
            )
        if samples <= 0:
            raise HvdliteError("the batch weights of all ranks are 0 in all steps since the last mean.")
        return self._samples / float(samples)

    def state(self) -> dict[str, Any]:
        """Return the state: the steps that this rank has made by itself; of an outer optimizer, its parameters and state."""
        state: dict[str, Any] = {"steps": self._steps, "samples": self._samples, "weighted": self._weighted}
        if self._outer is not None:
            state["start"] = [start.detach().clone() for start in self._start]
            state["outer"] = self._outer.state_dict()
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a state that `state` has returned."""
        self._steps, self._samples, self._weighted = state["steps"], state["samples"], state["weighted"]
        self._start, self._outer = [], None
        if isinstance(self._how, DiLoCo) and "outer" in state:
            pairs = zip(state["start"], self._context.trained(), strict=True)
            outer = self._begin_outer(self._how, [start.detach().clone().to(p.device) for start, p in pairs])
            outer.load_state_dict(state["outer"])
