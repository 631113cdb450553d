"""`OptimizerOptions`: the arguments of `DistributedOptimizer`, checked."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import hvdlite
from hvdlite import ProcessSet
from hvdlite.adapter import options
from hvdlite.errors import ArgumentError
from hvdlite.gradients.aggregator import name_of

Shard = bool | Literal["parameters"]
"""Whether an optimizer is sharded. ``"parameters"`` says that an unknown optimizer steps each parameter by itself."""


class StepsWith(enum.Enum):
    """The gradients that a rank's optimizer steps with."""

    ALL = "the combined gradients of all parameters"
    SHARD = "the combined gradients of this rank's shard of the parameters"
    OWN = "the gradients that this rank has computed"


@dataclass(frozen=True)
class OptimizerOptions(options.ExchangeOptions):
    """The arguments of `DistributedOptimizer`, checked.

    Attributes:
        overlap: Whether gradients travel while the backward pass goes on; if None, the setting `overlap` decides.
        passes: The largest number of backward passes before a step; 1 for any number.
        max_grad_norm: The largest norm of the combined gradients, which are clipped; None if they are not clipped.
        shard: Whether each rank steps a shard of the parameters.
        names: The names of parameters by their ``id``, for messages and for the check that all ranks have the same ones.

    Raises:
        ArgumentError: An argument has a value that is not allowed, or the arguments do not fit together.
    """

    process_set: ProcessSet = hvdlite.global_process_set
    overlap: bool | None = None
    passes: int = 1
    max_grad_norm: float | None = None
    shard: Shard = False
    names: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        options.check_passes(self.passes)
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ArgumentError(f"max_grad_norm={self.max_grad_norm}: expected a number above 0, or None.")
        if self.shard not in (True, False, "parameters"):
            raise ArgumentError(f'shard={self.shard!r}: expected True, False or "parameters".')
        if self.shard and self.op is hvdlite.Adasum:
            raise ArgumentError(
                "shard=True and op=Adasum do not go together: every rank makes a whole step of its own."
            )

    def _check_aggregator(self) -> None:
        super()._check_aggregator()
        self.refuse(
            f"aggregator={name_of(self.aggregator)}",
            "the aggregator alone says how gradients travel",
            overlap=self.overlap,
            shard=self.shard,
        )

    def _check_local_steps(self) -> None:
        super()._check_local_steps()
        why = "each rank steps all parameters with its own gradients"
        self.refuse(f"local_steps={self.local_steps}", why, shard=self.shard)

    @property
    def steps_with(self) -> StepsWith:
        """Which gradients the optimizer of each rank steps with."""
        if self.op is hvdlite.Adasum or self.local_steps is not None:
            return StepsWith.OWN
        return StepsWith.SHARD if self.shard else StepsWith.ALL

    def with_passes(self, passes: int) -> OptimizerOptions:
        """Return the same options with another number of backward passes.

        Raises:
            ArgumentError: `passes` is less than 1.
        """
        return replace(self, passes=passes)
