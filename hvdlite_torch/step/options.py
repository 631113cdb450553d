"""How the gradients of one optimizer are exchanged: the arguments of `DistributedOptimizer`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import hvdlite
from hvdlite import ProcessSet, ReduceOp
from hvdlite.errors import ArgumentError
from hvdlite_torch.step.codec import Codec

Shard = bool | Literal["parameters"]
"""Whether an optimizer is sharded; and that it is one that steps each parameter by itself, where that is not known."""


@dataclass(frozen=True)
class Options:
    """How gradients are exchanged: the arguments of `DistributedOptimizer`, checked.

    Attributes:
        op: Average or Sum.
        process_set: The ranks that take part.
        overlap: Exchange while the backward pass goes on; if None, as the setting of that name says.
        codec: How gradients are compressed; None if they are not.
        sparse_as_dense: Make sparse gradients dense.
        passes: Backward passes before a step, at most; 1 for any number.
        max_grad_norm: Clip the combined gradients to this norm; None to leave them.
        shard: Each rank steps a share of the parameters.
        names: Of parameters, by their ``id``, for messages and to see that all ranks mean the same.

    Raises:
        ArgumentError: `passes` is less than 1.
    """

    op: ReduceOp = hvdlite.Average
    process_set: ProcessSet = hvdlite.global_process_set
    overlap: bool | None = None
    codec: Codec | None = None
    sparse_as_dense: bool = False
    passes: int = 1
    max_grad_norm: float | None = None
    shard: Shard = False
    names: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.passes < 1:
            raise ArgumentError(f"backward_passes_per_step={self.passes}: expected 1 or more.")
