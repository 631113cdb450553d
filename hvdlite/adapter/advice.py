"""What goes wrong quietly: ranks that start apart, or that read the same data.

Looked for once for each list of variables, in the second exchange of their gradients: a program may broadcast its weights after
the first batch, as Horovod's examples do. Said once, by the first rank. The ranks do not count alike (one may have run out of
data), so whoever wants to look says so in the header of an exchange, and all look then::

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
"""Gives the tensors of which the gradients are; None if they are not in memory, as in a graph."""

_LOOK_IN = 2
"""The exchange to look in."""

_SAMPLES = 64
"""How many values of each variable are compared: enough to tell random numbers apart."""


class Seen(NamedTuple):
    """What one rank sees.

    Attributes:
        weights: Some values of each variable; None where it is none that is in memory.
        gradients: A checksum of all dense gradients; None if there is none, or they say nothing: zeros, infinities.
    """

    weights: list[Array] | None
    gradients: int | None


class Advice:
    """The advice for one list of variables, on one rank.

    Args:
        wanted: The user wants to hear it.
    """

    def __init__(self, wanted: bool) -> None:
        self._exchanges = 0 if wanted else _LOOK_IN

    def is_due(self) -> bool:
        """Whether to look in this exchange. Called once for each."""
        if self._exchanges >= _LOOK_IN:
            return False
        self._exchanges += 1
        return self._exchanges == _LOOK_IN


def see(values: Values, gradients: Sequence[Any]) -> Seen:
    """What this rank has to compare.

    Args:
        values: Gives the tensors whose gradients these are.
        gradients: This rank's gradients. Those that are not arrays are left out.
    """
    dense = [gradient for gradient in gradients if isinstance(gradient, np.ndarray)]
    checksum = 0
    for gradient in dense:
        checksum = zlib.crc32(np.ascontiguousarray(gradient).reshape(-1).view("u1").data, checksum)
    tells = any(gradient.any() for gradient in dense) and all(np.isfinite(gradient).all() for gradient in dense)
    return Seen(_samples(values()), checksum if tells else None)


def say(everybody: Sequence[Seen]) -> None:
    """Warn of what the ranks see together."""
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


def _samples(values: Sequence[Any] | None) -> list[Array] | None:
    if values is None:
        return None
    found = []
    for value in values:
        flat = adapter_for(value).to_array(value, wide=True).reshape(-1)
        found.append(flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES].copy())
    return found


def _alike(some: list[Array], others: list[Array]) -> bool:
    """Whether values are the same, but for the rounding of different processors."""
    return len(some) == len(others) and all(
        one.shape == other.shape and np.allclose(one, other, rtol=1e-3, atol=1e-6, equal_nan=True)
        for one, other in zip(some, others, strict=True)
    )


def _warn(text: str) -> None:
    warnings.warn(f"hvdlite: {text} (HVDLITE_ADVICE=0 says nothing.)", RuntimeWarning, stacklevel=2)
