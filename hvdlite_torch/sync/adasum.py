"""``op=Adasum``: not gradients are combined, but what each rank's own step would have changed.

Every rank steps by itself, from the same parameters; the changes are combined by Adasum (Maleki et al., arXiv:2006.02924,
section 4), and added to where all started. So any optimizer can be used, and its state is each rank's own.
"""

from __future__ import annotations

from typing import Any

import torch

import hvdlite
from hvdlite.errors import ArgumentError
from hvdlite_torch.step.context import OptimizerContext
from hvdlite_torch.sync.whole import WholeResults


class AdasumSync:
    """Combines the steps of the ranks: a `GradientSync` that acts after a step.

    Args:
        context: The optimizer. Of its options the process set and the codec are used.

    Attributes:
        results: This rank's own gradients.

    Raises:
        ArgumentError: An option says something about combined gradients.
    """

    def __init__(self, context: OptimizerContext) -> None:
        for name in ("overlap", "max_grad_norm"):
            if getattr(context.options, name):
                raise ArgumentError(
                    f"{name}={getattr(context.options, name)!r} has no meaning for op=Adasum: gradients are not combined."
                )
        self._context = context
        self.results = WholeResults(context)
        self._start: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Each parameter, and its values before the step."""

    @property
    def missed(self) -> bool:
        """Whether some rank has missed a step since all had the same state. Every rank asks."""
        steps = hvdlite.allgather_object(self._context.in_step.steps, process_set=self._context.process_set)
        return len(set(steps)) > 1

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

    def stand_in(self) -> None:
        """Nothing: the combination is a named operation, in which a rank that has joined takes part anyway."""

    # Gradients are each rank's own: nothing is done about them.

    def begin(self) -> None: ...
    def make_hooks(self) -> None: ...
    def ready(self, index: int, parameter: Any) -> None: ...
    def combine(self) -> None: ...
    def leave_out(self) -> None: ...
    def changed_unseen(self, how: str) -> None: ...
    def have_same_state(self) -> None: ...
    def leave(self) -> None: ...
