"""Which state of an aggregator a rank goes on from, if other ranks saved it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvdlite.gradients.lossy.names import LOSSY
from hvdlite.protocols import Array


def share_of(everybody: Sequence[Mapping[str, Any]], aggregator: Any, rank: int, ranks: int) -> Mapping[str, Any]:
    """Return the state that the aggregator of this rank gets.

    If as many ranks load as have saved, each gets its own. If not, those of `Compression.powersgd` and `topk` deal out their
    error memories so that the mean of what all ranks still have to send stays the same. Others get that of rank 0.

    Args:
        everybody: The states of the ranks that saved.
        aggregator: This rank's aggregator.
        rank: The number of this rank.
        ranks: How many ranks load.
    """
    if ranks == len(everybody):
        return everybody[rank]
    if isinstance(aggregator, LOSSY):
        mine = [state["errors"] for state in everybody[rank::ranks]]
        return {**everybody[0], "errors": _joint_errors(mine, ranks / len(everybody))}
    if rank == 0:
        warnings.warn(
            f"hvdlite: {len(everybody)} ranks saved this state, and {ranks} load it: the aggregators of all get rank 0's.",
            RuntimeWarning,
            stacklevel=2,
        )
    return everybody[0]


def _joint_errors(share: Sequence[Mapping[int, Any]], factor: float) -> dict[int, Array]:
    """Return the error memory of one rank that takes over those of several, or of none.

    Args:
        share: For each of these ranks, the errors by the numbers of parameters.
        factor: How many ranks there are, divided by how many there were.
    """
    numbers = dict.fromkeys(number for errors in share for number in errors)
    return {
        number: np.sum([np.asarray(errors[number]) for errors in share if number in errors], axis=0)
        * np.float32(factor)
        for number in numbers
    }
