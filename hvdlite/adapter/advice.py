"""Warnings of silent mistakes: ranks that start with different weights, or that read the same data.

The ranks compare their weights and gradients once for each list of variables, in the second exchange of the gradients: a
program may broadcast its weights after the first batch, as Horovod's examples do. Only the first rank gives the warning. The
ranks may count exchanges differently (one may have run out of data), so a rank that wants to compare says so in the header of
an exchange, and then all ranks compare::

    first exchange ─▶ second: "news" in some header ─▶ all ranks gather samples of weights, checksums of gradients ─▶ exchanged
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdlite.protocols import Array
from hvdlite.tensors.registry import adapter_for

Values = Callable[[], Sequence[Any] | None]
"""A function that returns the tensors whose gradients are exchanged; None if they have no values in memory, as in a graph."""

_LOOK_IN = 2
"""The number of the exchange in which the ranks compare."""

_SAMPLES = 64
"""The number of values of each variable that are compared: enough to tell random numbers apart."""


class Seen(NamedTuple):
    """The values of one rank that the ranks compare.

    Attributes:
        weights: Some values of each variable; None if the variables are not in memory.
        gradients: A checksum of all dense gradients; None if there is no dense gradient, all are zeros, or some value is not
            finite, so that a comparison would show nothing.
    """

    weights: list[Array] | None
    gradients: int | None


class Advice:
    """Counts the exchanges of one list of variables on one rank, up to the one in which the ranks compare.

    Args:
        wanted: Whether the user wants the warnings.
    """

    def __init__(self, wanted: bool) -> None:
        self._exchanges = 0 if wanted else _LOOK_IN

    def is_due(self) -> bool:
        """Return whether the ranks shall compare in this exchange. Each exchange calls this once."""
        if self._exchanges >= _LOOK_IN:
            return False
        self._exchanges += 1
        return self._exchanges == _LOOK_IN


def see(values: Values, gradients: Sequence[Any]) -> Seen:
    """Return the values of this rank that the ranks compare.

    Args:
        values: A function that returns the tensors whose gradients these are.
        gradients: This rank's gradients. Only arrays are compared.
    """
    dense = [gradient for gradient in gradients if isinstance(gradient, np.ndarray)]
    checksum = 0
    for gradient in dense:
        checksum = zlib.crc32(np.ascontiguousarray(gradient).reshape(-1).view("u1").data, checksum)
    tells = any(gradient.any() for gradient in dense) and all(np.isfinite(gradient).all() for gradient in dense)
    return Seen(_samples(values()), checksum if tells else None)


def say(everybody: Sequence[Seen]) -> None:
    """Warn if the weights of the ranks differ, or if all ranks have the same gradients.

    Args:
        everybody: The values of each rank.
    """
    weights = [seen.weights for seen in everybody]
    if any(each is not None and weights[0] is not None and not _alike(each, weights[0]) for each in weights):
        _warn(
            "the weights of the ranks differ in the second step, so they will stay different. If they start with different "
            "weights: fit with hvd.callbacks.Distributed(), or call hvd.broadcast_variables(model.weights, 0) before training. "
            "If not: their learning rates differ, or the program changes the weights of some ranks."
        )
    elif len(everybody) > 1 and everybody[0].gradients is not None and len({seen.gradients for seen in everybody}) == 1:
        _warn(
            f"the first gradients are the same, bit for bit, on all {len(everybody)} ranks: they read the same data in the "
            "same order, and more ranks teach nothing more. Give each its share: x[hvd.rank() :: hvd.size()], or "
            "hvd.shard(dataset)."
        )


def say_rates(told: str) -> None:
    """Warn that the learning rates of the ranks differ before the ranks were given the same state.

    Args:
        told: The rates of each rank, in words.
    """
    _warn(
        f"the learning rates of the ranks differ: {told}. So their weights come apart until the optimizer's variables are "
        "broadcast, by hvd.callbacks.BroadcastGlobalVariablesCallback(0) or hvd.broadcast_variables(optimizer.variables, 0)."
    )


def _samples(values: Sequence[Any] | None) -> list[Array] | None:
    if values is None:
        return None
    found = []
    for value in values:
        flat = adapter_for(value).to_array(value, wide=True).reshape(-1)
        found.append(flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES].copy())
    return found


def _alike(some: list[Array], others: list[Array]) -> bool:
    """Return whether values are equal, except for the rounding of different processors."""
    return len(some) == len(others) and all(
        one.shape == other.shape and np.allclose(one, other, rtol=1e-3, atol=1e-6, equal_nan=True)
        for one, other in zip(some, others, strict=True)
    )


def _warn(text: str) -> None:
    warnings.warn(f"hvdlite: {text} (HVDLITE_ADVICE=0 says nothing.)", RuntimeWarning, stacklevel=2)
