"""`Profile`: what was measured of a training program, as rank 0 writes it and the command reads it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdlite.protocols import TensorInfo
from hvdlite.tensors.reduction import nbytes_of
from hvdlite.tools.advise.exchanges import ExchangeCost
from hvdlite.tools.advise.link import NetworkLink

WHOLE = "whole gradients"
"""The `Profile.strategy` of a program that combines whole gradients, all of them in the step."""


@dataclass(frozen=True)
class MeasuredStep:
    """The seconds of one step of one rank.

    Attributes:
        compute: What the program does outside of the optimizer: data, forward, backward, logs.
        exchange: What the ranks do to combine gradients, and the wait for the slowest rank.
        update: The optimizer's own step.
    """

    compute: float
    exchange: float
    update: float


@dataclass(frozen=True)
class Compressed:
    """What a way to combine the gradients costs in one step.

    Attributes:
        seconds: The seconds of computation, on the slowest rank.
        exchanges: What it sends.
    """

    seconds: float
    exchanges: tuple[ExchangeCost, ...]


@dataclass(frozen=True)
class Profile:
    """What was measured.

    Attributes:
        hosts: For each rank, the number of its host.
        strategy: What the program itself does, in words.
        layout: Dtype and shape of each gradient.
        steps: For each rank, its steps. The numbers of the steps are the same.
        ready: For each gradient, how many seconds before the exchange the backward pass had it: the mean of the slowest rank.
        compressed: For each name, what a strategy that compresses gradients costs.
        copy: The seconds to copy a byte in memory, while all ranks of a host do that.
        meeting: The seconds of a meeting of the ranks of a host.
        link: What was measured between the hosts; None if there is one host.
        spare_core: Whether each rank has a core to spare.
        whole_update: Whether the update of a rank in `steps` is that of all parameters, and not of a shard.
    """

    hosts: tuple[int, ...]
    strategy: str
    layout: tuple[TensorInfo, ...]
    steps: tuple[tuple[MeasuredStep, ...], ...]
    ready: tuple[float, ...]
    compressed: Mapping[str, Compressed]
    copy: float
    meeting: float
    link: NetworkLink | None
    spare_core: bool
    whole_update: bool

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.hosts)

    @property
    def nbytes(self) -> int:
        """The bytes of all gradients."""
        return sum(nbytes_of(info) for info in self.layout)

    @property
    def elements(self) -> int:
        """The number of parameters."""
        return sum(math.prod(info.shape) for info in self.layout)

    @property
    def compute_together(self) -> float:
        """The computation of a step in which all ranks wait for the slowest: the mean of the steps."""
        return statistics.fmean(max(steps) for steps in zip(*self._computes(), strict=True))

    @property
    def compute_apart(self) -> list[float]:
        """The computation of a step of each rank, which waits for nobody: the mean of its steps."""
        return [statistics.fmean(own) for own in self._computes()]

    @property
    def update(self) -> float:
        """The step of the optimizer with all parameters, on the slowest rank."""
        update = max(statistics.fmean(step.update for step in own) for own in self.steps)
        return update if self.whole_update else update * self.ranks

    @property
    def exchange(self) -> float:
        """The exchange of a step, without the wait for the slowest rank, which waits for nobody: the mean of the steps."""
        return statistics.fmean(min(step.exchange for step in steps) for steps in zip(*self.steps, strict=True))

    @property
    def measured(self) -> float:
        """The mean of a whole step of the program as it is."""
        return max(statistics.fmean(each.compute + each.exchange + each.update for each in own) for own in self.steps)

    def _computes(self) -> list[list[float]]:
        return [[step.compute for step in own] for own in self.steps]

    def write(self, path: Path) -> None:
        """Write the profile to a file, whole or not at all."""
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read a profile that `write` has written."""
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        compressed = {
            name: Compressed(each["seconds"], tuple(ExchangeCost(*one) for one in each["exchanges"]))
            for name, each in said.pop("compressed").items()
        }
        link = said.pop("link")
        return cls(
            hosts=tuple(said.pop("hosts")),
            layout=tuple(_info(*each) for each in said.pop("layout")),
            steps=tuple(tuple(MeasuredStep(**step) for step in own) for own in said.pop("steps")),
            ready=tuple(said.pop("ready")),
            compressed=compressed,
            link=None if link is None else NetworkLink(**link),
            **said,
        )


def _info(dtype: str, shape: Sequence[int]) -> TensorInfo:
    return TensorInfo(dtype, tuple(shape))
