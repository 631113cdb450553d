"""`AdasumSync`: ``op=Adasum`` combines what the step of each rank has changed, and not the gradients.

Every rank makes its own step from the same parameters. Then Adasum combines the changes (Maleki et al., arXiv:2006.02924,
section 4), and the result is added to the parameters before the step. So any optimizer can be used, and each rank has its own
optimizer state.
"""

from __future__ import annotations

import torch

import hvdlite
from hvdlite.errors import ArgumentError
from hvdlite_torch.step.context import OptimizerContext
from hvdlite_torch.sync.whole import OwnSteps


class AdasumSync(OwnSteps):
    """The `GradientSync` that combines the changes of parameters after a step.

    Args:
        context: The optimizer. The process set and the codec among its options are used.

    Raises:
        ArgumentError: ``overlap`` or ``max_grad_norm`` is set, which need combined gradients.
    """

    def __init__(self, context: OptimizerContext) -> None:
        for name in ("overlap", "max_grad_norm"):
            if getattr(context.options, name):
                raise ArgumentError(
                    f"{name}={getattr(context.options, name)!r} has no meaning for op=Adasum: gradients are not combined."
                )
        super().__init__(context)
        self._start: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Each parameter that is trained, and a copy of its values before the step."""

    @torch.no_grad()
    def before_step(self) -> None:
        self._context.check_in_effect()
        self._start = [(parameter, parameter.detach().clone()) for parameter in self._context.trained()]

    @torch.no_grad()
    def after_step(self) -> None:
        codec, started = self._context.options.codec, self._start
        self._start = []
        changes = [parameter - start for parameter, start in started]
        encoded = [(change, None) if codec is None else codec.encode(change) for change in changes]
        combined = hvdlite.allreduce(
            [change for change, _ in encoded],
            hvdlite.Adasum,
            "optimizer.adasum",
            process_set=self._context.process_set,
        )
        for (parameter, start), (_, context), change in zip(started, encoded, combined, strict=True):
            parameter.copy_(start + (change if codec is None else codec.decode(change, context)))
