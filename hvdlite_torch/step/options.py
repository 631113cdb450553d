"""`Options`: the arguments of `DistributedOptimizer`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import hvdlite
from hvdlite import ProcessSet, ReduceOp
from hvdlite.errors import ArgumentError
from hvdlite.gradients.aggregator import Aggregator
from hvdlite.gradients.sync import StepsWith
from hvdlite_torch.step.codec import Codec

Shard = bool | Literal["parameters"]
"""Whether an optimizer is sharded. ``"parameters"`` says that an unknown optimizer steps each parameter by itself."""


@dataclass(frozen=True)
class Options:
    """The arguments of `DistributedOptimizer`, checked.

    Attributes:
        op: Average, Sum or Adasum.
        process_set: The ranks that take part.
        overlap: Whether gradients travel while the backward pass goes on; if None, the setting `overlap` decides.
        codec: Compresses gradients; None if they are not compressed.
        sparse_as_dense: Whether sparse gradients are made dense.
        passes: The largest number of backward passes before a step; 1 for any number.
        max_grad_norm: The largest norm of the combined gradients, which are clipped; None if they are not clipped.
        shard: Whether each rank steps a shard of the parameters.
        aggregator: Combines gradients; None for their weighted sum.
        names: The names of parameters by their ``id``, for messages and for the check that all ranks mean the same.

    Raises:
        ArgumentError: `passes` is less than 1, or an option does not go with `aggregator`.
    """

    op: ReduceOp = hvdlite.Average
    process_set: ProcessSet = hvdlite.global_process_set
    overlap: bool | None = None
    codec: Codec | None = None
    sparse_as_dense: bool = False
    passes: int = 1
    max_grad_norm: float | None = None
    shard: Shard = False
    aggregator: Aggregator | None = None
    names: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.passes < 1:
            raise ArgumentError(f"backward_passes_per_step={self.passes}: expected 1 or more.")
        if self.aggregator is not None:
            self._check_aggregator()

    def _check_aggregator(self) -> None:
        if not callable(getattr(self.aggregator, "aggregate", None)) or isinstance(self.aggregator, type):
            raise ArgumentError(
                f"aggregator={self.aggregator!r}: expected an object with a method aggregate(bucket, weights, collectives)."
            )
        others = {
            "op": self.op if self.op is not hvdlite.Average else None,
            "compression": None if self.codec is None else self.codec.name,
            "overlap": self.overlap,
            "shard": self.shard,
        }
        for name, value in others.items():
            if value:
                raise ArgumentError(
                    f"{name}={value!r} and aggregator={type(self.aggregator).__name__} do not go together: the aggregator "
                    "alone says how gradients travel and are combined, once in a step, on every rank."
                )

    @property
    def steps_with(self) -> StepsWith:
        """What the optimizer of each rank steps with."""
        if self.op is hvdlite.Adasum:
            return StepsWith.OWN
        return StepsWith.SHARD if self.shard else StepsWith.ALL

    def with_passes(self, passes: int) -> Options:
        """Return the same options with another number of backward passes.

        Raises:
            ArgumentError: `passes` is less than 1.
        """
        return replace(self, passes=passes)
