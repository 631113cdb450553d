"""Which variables of an optimizer are a rank's own, and what becomes of accumulated gradients when ranks join or load.

Every variable of an optimizer is of one of three kinds. This module knows them, for all optimizers:

- A rank's *own*: gradients that the rank adds up for its next update, local variables, and the slots of these. No rank gets
  those of another rank, neither by a broadcast nor by a join.
- The rank's *for a while*, with ``local_steps=``: everything by which it steps between two meetings.
- All others are *equal* on all ranks: slots, moving averages, counts, learning rates, scales of losses. A sharded optimizer has
  shares of them. So has an optimizer that adds up what the ranks have exchanged already: a sharded one, one inside a
  LossScaleOptimizer or a MultiOptimizer, and one that is not distributed.

::

    rank 0, passes 1 2 │ 3      ─▶ own sum of pass 3 ┐ join: nobody has missed a pass ─▶ each rank keeps its sum
    rank 1, passes 1 2 │ 3      ─▶ own sum of pass 3 ┘
    rank 0, passes 1 2 │ 3      ─▶ own sum of pass 3 ┐ join: the ranks with a sum have the same passes in it
    rank 1, passes 1 2 │        ─▶ nothing           ┘ ─▶ each rank gets the mean over them, as one process has it
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

import hvdlite
from hvdlite.api import world
from hvdlite.gradients.same_number import checksum
from hvdlite.protocols import Array
from hvdlite_tf.gradients.optimizer_parts import is_sharded, parts_inside, slots_of
from hvdlite_tf.variables import plain_variable

_MARK_BITS = 32
"""The bits of a checksum of accumulated gradients."""


def sums_of(optimizer: Any) -> list[Any]:
    """Return the variables in which a built optimizer of Keras 3, or one inside it, adds up gradients for its next update."""
    return [each for _, each in _summed(optimizer)]


def summed_for(optimizer: Any) -> list[Any]:
    """Return the variables whose gradients are added up in `sums_of`, in that order."""
    return [variable for variable, _ in _summed(optimizer)]


def _summed(optimizer: Any) -> list[tuple[Any, Any]]:
    parts = [part for part in parts_inside(optimizer) if getattr(part, "gradient_accumulation_steps", None)]
    return [
        (variable, each)
        for part in parts
        for variable, each in zip(
            part._trainable_variables, getattr(part, "_accumulated_gradients", None) or (), strict=False
        )
        if each is not None
    ]


def has_own_sums(optimizer: Any) -> bool:
    """Return whether a rank adds up its own gradients in `sums_of`, and not those of all ranks."""
    state = getattr(optimizer, "_hvdlite", None)
    if state is None or is_sharded(optimizer):
        return False
    alone = state.steps is not None and _steps_of(optimizer) > 1
    return alone or bool(getattr(optimizer, "gradient_accumulation_steps", None))


def local_variables_of(optimizer: Any) -> list[Any]:
    """Return the local variables that a built distributed optimizer of Keras 3 trains, and their slots."""
    state = getattr(optimizer, "_hvdlite", None)
    if state is None or not state.local or is_sharded(optimizer) or not getattr(optimizer, "built", False):
        return []
    found = []
    for part in parts_inside(optimizer):
        local = [variable in state.local for variable in part._trainable_variables]
        for slots in (part._trainable_variables, *slots_of(part).values()):
            found += [slot for slot, own in zip(slots, local, strict=True) if own and slot is not None]
    return found


def own_of(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer that are a rank's own."""
    return [*(sums_of(optimizer) if has_own_sums(optimizer) else ()), *local_variables_of(optimizer)]


def without(variables: Sequence[Any], left_out: Sequence[Any]) -> list[Any]:
    """Return variables without some of them."""
    apart = {id(plain_variable(variable)) for variable in left_out}
    return [variable for variable in variables if id(plain_variable(variable)) not in apart]


def settle(optimizer: Any, passes: Sequence[int], root: int) -> None:
    """Let the gradients that ranks have added up count, after some have missed passes. Every rank of the optimizer calls this.

    Ranks that have missed an update forget what they have added up for it. If then the sums of all ranks that have some are of
    the same passes, all ranks get their mean: it is what one process has added up. Otherwise each rank keeps its own sum, in
    which the passes that it has missed count as zero.

    Args:
        optimizer: A distributed optimizer of Keras 3, which is built.
        passes: The number of passes of each rank.
        root: The rank, by its number, whose count of passes all ranks go on with.
    """
    if not has_own_sums(optimizer):
        return
    state, steps = optimizer._hvdlite, _steps_of(optimizer)
    here = world("join()").group(state.options.process_set)
    sums = sums_of(optimizer)
    mark = checksum(map(_array, sums), _MARK_BITS) if any(_array(each).any() for each in sums) else None
    marks = hvdlite.allgather_object((mark, mark == state.joint), process_set=state.options.process_set)
    updates = [made // steps for made in passes]
    behind = [made < updates[root] for made in updates]
    # Of what all ranks have got from a join before, the others still have the same.
    lost = [here.ranks[r] for r, (own, joint) in enumerate(marks) if behind[r] and own is not None and not joint]
    if lost and here.rank == 0:
        warnings.warn(
            f"hvdlite: rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))} ran out of data between two updates, with "
            "gradient_accumulation_steps: the batches since the last update do not count. Give each rank a number of "
            "batches that is a multiple of it, or the same number to all.",
            RuntimeWarning,
            stacklevel=2,
        )
    if behind[here.rank]:
        for each in sums:
            each.assign(keras.ops.zeros_like(each))
    rests = [
        0 if late or own is None else made % steps for made, late, (own, _) in zip(passes, behind, marks, strict=True)
    ]
    averages = state.options.op is hvdlite.Average and state.options.aggregator is None and state.steps is None
    if averages and set(rests) == {0, rests[root]} and rests[root]:
        weight = (1.0 if state.weight is None else float(state.weight)) if rests[here.rank] else 0.0
        given = [np.array([weight]), *(_array(each) * weight for each in sums)]
        name, process_set = "accumulated gradients", state.options.process_set
        total, *found = hvdlite.allreduce(given, hvdlite.Sum, name, process_set=process_set)
        for each, value in zip(sums, found, strict=True):
            each.assign(value / total)
        state.joint = checksum(map(_array, sums), _MARK_BITS)


def saved_sums(plain: Any, optimizer: Any) -> list[Array]:
    """Return the gradients that an optimizer has added up since its last update, for a checkpoint.

    Args:
        plain: An optimizer that has them: a plain copy of a sharded one, or `optimizer`.
        optimizer: The optimizer.
    """
    return [_array(each) / _factor(optimizer) for each in sums_of(plain)]


def load_sums(
    plain: Any, optimizer: Any, everybody: Sequence[Sequence[Array] | None], summed: bool, rank: int, ranks: int
) -> None:
    """Set the gradients that an optimizer has added up.

    Each rank gets its own if as many ranks load as have saved. If not, all get the same, so that the update stays what it was.

    Args:
        plain, optimizer: See `saved_sums`.
        everybody: What `saved_sums` returned on each rank that saved, or None where all are zero; that of one rank, if it was
            the same on all.
        summed: Whether the update sums over the ranks, and does not average.
        rank: The number of this rank.
        ranks: How many ranks load.
    """
    own, found = has_own_sums(optimizer), None
    there = [each for each in everybody if each is not None]
    if own and len(everybody) == ranks:
        found = everybody[rank]
    elif there:
        divisor = (ranks if own else 1) if summed else len(everybody)
        found = [np.sum(values, axis=0) / divisor for values in zip(*there, strict=True)]
    for place, each in enumerate(sums_of(plain)):
        each.assign(keras.ops.zeros_like(each) if found is None else np.asarray(found[place]) * _factor(optimizer))


def _steps_of(optimizer: Any) -> int:
    """Return the number of passes of one update."""
    return max(getattr(part, "gradient_accumulation_steps", None) or 1 for part in parts_inside(optimizer))


def _factor(optimizer: Any) -> float:
    """Return by what a distributed optimizer has multiplied the gradients before it has added them up."""
    state = getattr(optimizer, "_hvdlite", None)
    return 1.0 if state is None or has_own_sums(optimizer) else float(state.factor)


def _array(variable: Any) -> Array:
    array: Array = keras.ops.convert_to_numpy(plain_variable(variable)).astype(np.float64)
    return array
