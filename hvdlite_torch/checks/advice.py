"""Warnings of mistakes that raise no error.

The ranks may start with different weights, read the same data, or keep the learning rate of one process. The checks run once,
at the first step, and only rank 0 warns.
"""

from __future__ import annotations

import inspect
import warnings
import zlib
from collections.abc import Sequence

import torch

import hvdlite
from hvdlite import ReduceOp
from hvdlite.api import world
from hvdlite.errors import MismatchError
from hvdlite.ranks.together import Together
from hvdlite.tensors.registry import adapter_for

_NOT_THE_USERS = ("hvdlite", "hvdlite_torch", "torch")
"""Packages whose lines a warning should not point at."""


class Advice:
    """The warnings for one optimizer, on one rank.

    Args:
        optimizer: The optimizer, whose learning rate is checked.
        op: The reduction of the gradients.
        together: The ranks that take part.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, op: ReduceOp, together: Together) -> None:
        self._optimizer = optimizer
        self._op = op
        self._together = together
        self._given = self._odd_passes_given = self._late_weight_given = not world().config.advice

    def before_exchange(self, parameters: Sequence[torch.Tensor]) -> None:
        """Check the weights and this rank's own gradients before the first exchange. Every rank calls this at each step.

        Raises:
            MismatchError: Ranks have the same parameters in different orders. All ranks raise it.
        """
        if self._given:
            return
        gradients = [p.grad for p in parameters if p.grad is not None and p.grad.layout is torch.strided]
        own = tuple(_checksum([parameter]) for parameter in parameters)
        everybody = self._together.gather((own, _checksum(gradients) if gradients else None))
        self._check_order(parameters, [weights for weights, _ in everybody])
        self._given = True
        if len(everybody) == 1 or hvdlite.rank() != 0:
            return
        if len({weights for weights, _ in everybody}) > 1:
            say(
                "the ranks start with different parameters, so they will stay different: call "
                "hvd.broadcast_parameters(model.state_dict()) before training."
            )
        elif len({gradients for _, gradients in everybody}) == 1 and everybody[0][1] is not None:
            say(
                f"the first gradients are the same, bit for bit, on all {len(everybody)} ranks: they read the same data with "
                "the same seed, and more ranks teach nothing more. Give each its share, for example by "
                "DistributedSampler(data, hvd.size(), hvd.rank())."
            )
        if self._op is hvdlite.Average and self._has_default_lr():
            say(
                f"the learning rate is {type(self._optimizer).__name__}'s default, and a step now averages the batches of "
                f"{len(everybody)} ranks. hvd.scale_lr(optimizer) scales it for that. Leave it if the program has "
                "divided its batch size by the number of ranks."
            )

    def odd_passes(self, passes: int) -> None:
        """Warn that the ranks made different numbers of backward passes; this rank made `passes`. Every rank calls this."""
        if self._odd_passes_given:
            return
        self._odd_passes_given = True
        variants = self._together.variants([f"{passes}"])
        if hvdlite.rank() == 0:
            say(
                "the ranks have made different numbers of backward passes for this step:\n"
                f"{variants}\n"
                "Has a rank left out a step? From there on its batches are combined with those of another step of the others, "
                "and at the end it is one behind. A rank without samples calls step() too, after optimizer.set_batch_weight(0)."
            )

    def late_weight(self) -> None:
        """Warn that the program set a batch weight after the first step, which had none."""
        if self._late_weight_given:
            return
        self._late_weight_given = True
        if hvdlite.rank() == 0:
            say(
                "set_batch_weight() was called between the first step, which had no weight, and the next backward pass: it is "
                "the weight of the next step. Call it before optimizer.step() of the batch that it belongs to."
            )

    def clipped_alone(self, called: str, how: str) -> None:
        """Warn that the program clips gradients before they are combined.

        Args:
            called: The name of the function that clips.
            how: The way in which it clips, in words.
        """
        if hvdlite.rank() == 0:
            say(
                f"{called}() clips {how}, for they are combined by optimizer.step(): that is not what one process does with "
                "the joined batch. Pass max_grad_norm to DistributedOptimizer instead; or call optimizer.synchronize() before "
                "you clip."
            )

    def clipped_with_others(self, called: str, others: Sequence[torch.Tensor]) -> None:
        """Warn that the norm by which the program clips has gradients in it that no optimizer combines.

        Args:
            called: The name of the function that clips.
            others: The parameters whose gradients these are.
        """
        if hvdlite.rank() == 0:
            say(
                f"{called}() counts {len(others)} gradients that no DistributedOptimizer combines, such as one of shape "
                f"{tuple(others[0].shape)}: each rank clips by another norm, and the ranks' weights drift apart. Clip the "
                "parameters of the optimizer only, or give it the others too, or call requires_grad_(False) on them."
            )

    def _check_order(self, parameters: Sequence[torch.Tensor], everybody: Sequence[tuple[int, ...]]) -> None:
        """Raise MismatchError if a rank has the same parameters in another order.

        No exchange would notice that if the parameters' shapes are equal.
        """
        first = everybody[0]
        for rank, other in zip(self._together.ranks, everybody, strict=True):
            if other == first or sorted(other) != sorted(first):
                continue
            place = next(number for number, pair in enumerate(zip(first, other, strict=True)) if pair[0] != pair[1])
            info = adapter_for(parameters[place]).info(parameters[place])
            raise MismatchError(
                f"the ranks have the same parameters in another order: parameter {place} of rank {self._together.ranks[0]} "
                f"({info.dtype} of shape {info.shape}) is parameter {other.index(first[place])} of rank {rank}. Gradients of "
                "different layers would be added up. Make the layers in the same order on every rank; with "
                "DistributedOptimizer(optimizer, model.named_parameters()) the error says their names."
            )

    def _has_default_lr(self) -> bool:
        parameter = inspect.signature(type(self._optimizer).__init__).parameters.get("lr")
        default = None if parameter is None else parameter.default
        return isinstance(default, float) and all(group.get("lr") == default for group in self._optimizer.param_groups)


def _checksum(tensors: Sequence[torch.Tensor]) -> int:
    checksum = 0
    for tensor in tensors:
        memory = adapter_for(tensor).to_array(tensor.detach().contiguous(), wide=False).reshape(-1).view("u1")
        checksum = zlib.crc32(memory.data, checksum)
    return checksum


def say(text: str) -> None:
    """Warn the program, at its own line."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(f"hvdlite: {text} (HVDLITE_ADVICE=0 says nothing.)", RuntimeWarning, stacklevel=level)
