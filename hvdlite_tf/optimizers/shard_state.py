"""The state of a sharded optimizer as that of a plain one, and back.

A plain optimizer of the same class and settings, which is built for the whole variables, stands for the state of all ranks: it
knows in which order Keras writes its variables, and it is loaded as Keras loads it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite.api import allgather_object
from hvdlite.errors import ArgumentError
from hvdlite.protocols import Array
from hvdlite_tf.gradients.copies import plain_copy
from hvdlite_tf.gradients.optimizer_parts import innermost, slots_of
from hvdlite_tf.optimizers.shards import Shards
from hvdlite_tf.variables import plain_variable, read


def whole_copy(optimizer: Any, shards: Shards, gather: bool = False) -> Any:
    """Return a plain optimizer like a sharded one, built for the whole variables.

    Args:
        optimizer: The sharded optimizer.
        shards: This rank's share.
        gather: Whether it gets the state of all ranks. Every rank calls this then.

    Raises:
        ArgumentError: The optimizer cannot be made again from its configuration, or has state that does not belong to variables
            one by one.
    """
    copied = plain_copy(optimizer)
    copied.build(shards.variables)
    ours, theirs = replicated_in(optimizer), replicated_in(copied)
    if [tuple(each.shape) for each in ours] != [tuple(each.shape) for each in theirs]:
        raise ArgumentError(
            f"{optimizer.__class__.__name__} with shard=True keeps variables of its own that are not in lists with one for "
            "each variable of the model, so its state cannot be put together: leave out shard=True."
        )
    if not gather:
        return copied
    own = [
        (piece, {name: _array(slots[place]) for name, slots in slots_in(optimizer).items() if slots[place] is not None})
        for place, piece in enumerate(shards.pieces)
    ]
    name = "the state of a sharded optimizer"
    everybody = allgather_object(own, name, process_set=shards.process_set)
    targets = slots_in(copied)
    whole = {
        name: {number: _array(slot) for number, slot in enumerate(slots) if slot is not None}
        for name, slots in targets.items()
    }
    for piece, arrays in (each for rank in everybody for each in rank):
        for name, array in arrays.items():
            target = whole[name][piece.tensor]
            if array.shape == target.shape:
                target[...] = array
            else:
                target.reshape(-1)[piece.start : piece.stop] = array
    for name, values in whole.items():
        for number, value in values.items():
            targets[name][number].assign(value)
    for variable, value in zip(theirs, ours, strict=True):
        variable.assign(_array(value))
    return copied


def assign_state(optimizer: Any, shards: Shards, copied: Any) -> None:
    """Give a sharded optimizer this rank's share of the state of a plain one that is built for the whole variables."""
    for variable, value in zip(replicated_in(optimizer), replicated_in(copied), strict=True):
        variable.assign(_array(value))
    whole = slots_in(copied)
    for name, slots in slots_in(optimizer).items():
        for piece, slot in zip(shards.pieces, slots, strict=False):
            if slot is not None:
                array = _array(whole[name][piece.tensor])
                same = array.shape == tuple(slot.shape)
                slot.assign(array if same else array.reshape(-1)[piece.start : piece.stop])


def slots_in(optimizer: Any) -> dict[str, list[Any]]:
    """Return `slots_of` the optimizer that makes the steps, with the moving averages."""
    inner = innermost(optimizer)
    state = getattr(inner, "_hvdlite_sharded", None)
    averages = [] if state is None else state.averages
    return slots_of(inner) | ({"_model_variables_moving_average": averages} if averages else {})


def replicated_in(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer that it has once: learning rates, counts, scales of losses."""
    apart = {id(slot) for slots in slots_in(optimizer).values() for slot in slots}
    return [variable for variable in optimizer.variables if id(variable) not in apart]


def _array(variable: Any) -> Array:
    return np.array(tf.convert_to_tensor(read(plain_variable(variable))))
