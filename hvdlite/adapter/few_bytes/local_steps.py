"""`LocalSGD` and `DiLoCo`: how often ranks that train by themselves bring their parameters together; `Rounds`: how they meet.

A round is what happens between two meetings::

    round of a rank:   its own steps, with its own gradients      parameters of the ranks differ
    meeting:           parameters × this rank's share of the samples ─▶ sum over the ranks ─▶ all go on with the mean
                       or with what an outer optimizer makes of the way to the mean (DiLoCo)

An adapter counts the steps here and moves the results to its parameters. An outer optimizer is one of its framework.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlite.api import Sum, allreduce
from hvdlite.checks import check_count
from hvdlite.errors import HvdliteError, MismatchError
from hvdlite.gradients.codec import Codec
from hvdlite.gradients.same_number import are_equal, checksum, with_square
from hvdlite.ranks.process_set import ProcessSet
from hvdlite.tensors.registry import adapter_for

_MARK_BITS = 20
"""The bits of a checksum: the sum of their squares must be exact in float64, for thousands of ranks."""


@dataclass(frozen=True)
class LocalSGD:
    """Each rank makes steps of its own. After `every` of them, all ranks go on with the mean of their parameters.

    Source: Stich, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767. With ``every=1`` and plain SGD this is
    training with averaged gradients. Each rank keeps its own optimizer state.

    Args:
        every: The number of steps from one mean to the next.

    Raises:
        ArgumentError: `every` is no whole number from 1 on.

    Examples:
        >>> import torch, hvdlite_torch
        >>> def trained():
        ...     weight = torch.nn.Parameter(torch.zeros(1))
        ...     how = hvdlite_torch.LocalSGD(every=2)
        ...     optimizer = hvdlite_torch.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), local_steps=how)
        ...     for step in range(2):
        ...         optimizer.zero_grad()
        ...         (weight * hvdlite.rank()).sum().backward()
        ...         optimizer.step()
        ...         yield weight.item()
        >>> on_ranks(2, lambda: list(trained()))  # the ranks differ after a step, and have the mean of 0 and -2 after two
        [[0.0, -1.0], [-1.0, -1.0]]
    """

    every: int = 8

    def __post_init__(self) -> None:
        check_count(f"{type(self).__name__}: every", self.every, "number of steps")

    @property
    def name(self) -> str:
        """What must be the same on all ranks."""
        return f"{type(self).__name__}(every={self.every})"


@dataclass(frozen=True)
class DiLoCo(LocalSGD):
    """The same, but the mean is only the direction in which an outer optimizer steps.

    The outer gradient is the difference of the parameters before the steps and the mean after them (Douillard et al., "DiLoCo:
    Distributed Low-Communication Training of Language Models", arXiv:2311.08105). All ranks make the same outer step. With
    ``compression=hvd.Compression.fp16`` (or bf16) of the optimizer the outer gradient is rounded before it travels.

    Args:
        every: The number of steps from one outer step to the next.
        outer: The outer optimizer. For torch a function that makes it of a list of parameters; for Keras an optimizer of
            Keras, which nothing else uses. None means SGD with Nesterov momentum 0.9 and learning rate 0.7, as in the paper.

    Examples:
        >>> import torch, hvdlite_torch
        >>> def trained():
        ...     weight = torch.nn.Parameter(torch.zeros(1))
        ...     how = hvdlite_torch.DiLoCo(every=2, outer=lambda parameters: torch.optim.SGD(parameters, lr=0.5))
        ...     optimizer = hvdlite_torch.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), local_steps=how)
        ...     for step in range(2):
        ...         optimizer.zero_grad()
        ...         (weight * hvdlite.rank()).sum().backward()
        ...         optimizer.step()
        ...         yield weight.item()
        >>> on_ranks(2, lambda: list(trained()))  # the outer step goes half of the way from 0 to the mean, which is -1
        [[0.0, -0.5], [-1.0, -0.5]]
    """

    every: int = 64
    outer: Any = None


OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
"""The learning rate and the Nesterov momentum of the outer SGD of the paper on DiLoCo."""


class Rounds:
    """The steps of one rank since the last meeting, and the meeting. Every rank makes one, with equal arguments.

    Args:
        how: How often the ranks meet.
        process_set: The ranks that take part; all if None.
        codec: Encodes what travels; None to leave it as it is.
        parts: The number of backward passes that are one step.

    Attributes:
        made: The number of passes that this rank has made.
        pending: Whether this rank has made a pass since the last meeting.
    """

    def __init__(self, how: LocalSGD, process_set: ProcessSet | None, codec: Codec | None, parts: int = 1) -> None:
        self._every, self._parts, self._process_set, self._codec = how.every, parts, process_set, codec
        self.made = 0
        self._passes = 0
        self._samples, self._weighted = 0.0, False

    @property
    def pending(self) -> bool:
        return self._passes > 0

    def weigh(self, weight: float, is_set: bool) -> None:
        """Count the samples of a pass.

        Args:
            weight: Their number.
            is_set: Whether the program has set the number.
        """
        self._samples += weight
        self._weighted = self._weighted or is_set

    def count(self) -> bool:
        """Count a pass, and return whether the ranks meet now."""
        self.made += 1
        self._passes += 1
        # A round may begin between two passes of one step, and the parameters change with the last of them.
        steps = self.made // self._parts - (self.made - self._passes) // self._parts
        return self.made % self._parts == 0 and steps >= self._every

    def begin(self) -> None:
        """Begin a round: forget the passes since the last meeting."""
        self._passes, self._samples, self._weighted = 0, 0.0, False

    def meet(self, parameters: Sequence[Any], start: Sequence[Any] = ()) -> list[Any]:
        """Return the mean of the parameters of all ranks, and begin a round. Every rank calls this.

        Args:
            parameters: This rank's parameters, tensors of any framework, which are only read.
            start: For an outer optimizer, the parameters that all ranks had at the beginning of the round.

        Returns:
            For each parameter a new tensor: the mean weighted by samples; with `start` the outer gradient, which is the
            difference of `start` and the mean.

        Raises:
            MismatchError: The ranks went on from different parameters, or only some said weights. Raised on all ranks.
            HvdliteError: The weights of all ranks are 0. Raised on all ranks.
        """
        share = self._share(start)
        if start:  # small numbers, which lose little if they are rounded
            values = [(before - after) * share for before, after in zip(start, parameters, strict=True)]
        else:
            values = [parameter * share for parameter in parameters]
        codec = self._codec
        sent = [(value, None) if codec is None else codec.encode(value) for value in values]
        name, process_set = "optimizer.local_steps", self._process_set
        found: list[Any] = allreduce([value for value, _ in sent], Sum, name, process_set=process_set)
        self.begin()
        if codec is not None:
            found = [codec.decode(value, context) for value, (_, context) in zip(found, sent, strict=True)]
        return found

    def _share(self, start: Sequence[Any]) -> float:
        """Return this rank's part of all samples, after the ranks have compared where they began."""
        mark = checksum((adapter_for(each).to_array(each, wide=False) for each in start), _MARK_BITS)
        told = np.array([self._samples, self._weighted, 1, *with_square(mark)], np.float64)
        name, process_set = "optimizer.local_steps.told", self._process_set
        # A rank that has joined counts nothing.
        samples, weighted, count, *marks = allreduce(told, Sum, name, process_set=process_set).tolist()
        if not are_equal(count, *marks):
            raise MismatchError(
                "DiLoCo: the ranks went on from different parameters. Begin with hvd.broadcast_parameters(model, 0) in torch, "
                "hvd.broadcast_variables(model.weights, 0) or hvd.callbacks.Distributed() in Keras. After loading a checkpoint "
                "on one rank, give its state to the others: hvd.broadcast_optimizer_state(optimizer, that_rank) in torch, "
                "optimizer.load_exchange_state(hvd.broadcast_object(state, that_rank)) in Keras."
            )
        if weighted not in (0, count):
            raise MismatchError(
                f"{weighted:.0f} of {count:.0f} ranks have set batch weights. Either all ranks call set_batch_weight, or none."
            )
        if samples <= 0:
            raise HvdliteError("the batch weights of all ranks are 0 in all steps since the last mean.")
        return self._samples / float(samples)

    def state(self) -> dict[str, Any]:
        """Return the state of this rank: numbers by name."""
        return {"made": self.made, "steps": self._passes, "samples": self._samples, "weighted": self._weighted}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a state that `state` has returned."""
        self.made, self._passes = int(state["made"]), int(state["steps"])
        self._samples, self._weighted = float(state["samples"]), bool(state["weighted"])
