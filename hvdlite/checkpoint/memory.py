"""Copies of states in this process's memory, in the same form as in a checkpoint: what elastic training commits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from hvdlite.api import allgather_object, rank, size
from hvdlite.checkpoint.parts import merge, own_part, tensor_keys, what_is_missing
from hvdlite.checkpoint.states import Stateful
from hvdlite.checkpoint.structure import Reader, Tree, Writer
from hvdlite.checkpoint.tensor_file import Stored, info_of
from hvdlite.errors import CheckpointError
from hvdlite.tensors.registry import adapter_for


class Copy(NamedTuple):
    """A copy of an object's state. It can be pickled, and its tensors are NumPy arrays.

    Attributes:
        tree: The state; see `hvdlite.checkpoint.structure`.
        arrays: The tensors: for each rank that made some, by name.
    """

    tree: Tree
    arrays: Mapping[str, Mapping[str, Stored]]


def copy_of(name: str, target: Stateful) -> Copy:
    """Return a copy of an object's state, which is whole on every rank. Every rank calls this.

    Args:
        name: The name of the object, for errors.
        target: The object.

    Raises:
        ArgumentError: A value cannot be pickled. The text says where it is.
        CheckpointError: Some ranks lack their part of the state. All ranks raise it.
    """
    snapshot = target.snapshot(rank())
    value = snapshot.value
    if snapshot.on_each_rank and size() > 1:
        keys = allgather_object(
            tensor_keys(value), f"what there is of the state of {name}, which is saved on every rank"
        )
        value = own_part(value, [each for before in keys[: rank()] for each in before])
    writer = Writer(f"rank {rank()}", allow_pickle=True)
    tree = writer.tree_of(value, name)
    arrays = {each: _copied(tensor) for each, tensor in writer.tensors.items()}
    if not snapshot.on_each_rank or size() == 1:
        return Copy(tree, {writer.file: arrays})
    told = allgather_object((tree, arrays), f"the state of {name}, which is saved on every rank")
    whole = merge([each for each, _ in told])
    if missing := what_is_missing(whole, name):
        raise CheckpointError(f"{missing}: some ranks lack their part of the state.")
    return Copy(whole, {f"rank {number}": each for number, (_, each) in enumerate(told)})


def restore(copy: Copy, target: Stateful) -> None:
    """Set an object's state to a copy, which any number of ranks may have made. Every rank calls this, or one alone.

    Args:
        copy: What `copy_of` has returned, on any rank.
        target: The object.
    """
    target.restore(Reader(copy.arrays, allow_pickle=True).value_of(copy.tree), rank(), size())


def _copied(tensor: Any) -> Stored:
    return Stored(info_of(tensor).dtype, np.array(adapter_for(tensor).to_array(tensor, wide=False)))
