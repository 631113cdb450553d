"""``op=Adasum``: not gradients are combined, but what each rank's own step would have changed.

Every rank steps by itself, from the same parameters; the changes are combined by Adasum (Maleki et al., arXiv:2006.02924,
section 4), and added to where all started. So any optimizer can be used, and its state is each rank's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

import hvdlite
from hvdlite.errors import ArgumentError
from hvdlite_torch.step.amp import share_infinities
from hvdlite_torch.step.closures import closure_of, replace_closure
from hvdlite_torch.step.exchange import OptimizerExchange
from hvdlite_torch.step.options import Options
from hvdlite_torch.step.own_parameters import refuse_steps


class AdasumExchange(OptimizerExchange):
    """Combines the steps of the ranks.

    Args:
        optimizer: Its step hooks are made by `attach`.
        options: Of which the process set and the codec are used.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options) -> None:
        for name in ("overlap", "max_grad_norm"):
            if getattr(options, name):
                raise ArgumentError(
                    f"{name}={getattr(options, name)!r} has no meaning for op=Adasum: gradients are not combined."
                )
        super().__init__(optimizer, options)
        self._start: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._steps = 0  # since all ranks had the same state

    def set_weight(self, weight: float) -> None:
        """Raise: Adasum weighs by itself."""
        raise ArgumentError("a batch weight has no meaning for op=Adasum: it is for averages.")

    def before_unscale(self) -> None:
        """Nothing: gradients are each rank's own."""

    def after_unscale(self, infinities: Iterable[torch.Tensor]) -> None:
        """A GradScaler has counted infinities: all ranks skip a step, or none does."""
        share_infinities(infinities, self.process_set)

    def synchronize(self) -> None:
        """Nothing: gradients stay each rank's own, and its step is combined when it has been made."""

    @contextlib.contextmanager
    def skip(self) -> Iterator[None]:
        """Nothing, as `synchronize` does nothing that a step could leave out."""
        yield

    quiet = skip

    @property
    def missed(self) -> bool:  # type: ignore[override]  # it is asked for, each time
        """Whether some rank has missed a step since all had the same state. Every rank asks."""
        return len(set(hvdlite.allgather_object(self._steps, process_set=self.process_set))) > 1

    def have_same_state(self) -> None:
        self._steps = 0

    def stand_in(self) -> None:
        """Nothing: the combination is a named operation, in which who has joined takes part anyway."""

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        refuse_steps(optimizer)
        self._check_in_effect()
        closure = closure_of(args, kwargs)
        if closure is not None:  # evaluated first, from the parameters that all have
            with torch.enable_grad():
                loss = closure()
            args, kwargs = replace_closure(args, kwargs, lambda: loss)
        self._start = [
            (parameter, parameter.detach().clone())
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        return args, kwargs

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        codec = self._options.codec
        changes = [parameter - start for parameter, start in self._start]
        encoded = [(change, None) if codec is None else codec.encode(change) for change in changes]
        combined = hvdlite.allreduce(
            [change for change, _ in encoded], hvdlite.Adasum, "optimizer.adasum", process_set=self.process_set
        )
        for (parameter, start), (_, context), change in zip(self._start, encoded, combined, strict=True):
            parameter.copy_(start + (change if codec is None else codec.decode(change, context)))
        self._start = []
        self._steps += 1
