"""Whether all ranks read a dataset in the same order, so that what one rank leaves out is what another one takes.

A dataset that shuffles carries its seeds with it from where it was made. Ranks that made it with different ones would cut
different rows out of different orders: some rows would be seen twice, and others never.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

import hvdlite
from hvdlite import ProcessSet
from hvdlite.errors import ArgumentError, MismatchError


class _Order(NamedTuple):
    """What decides which rows come when.

    Attributes:
        structure: Dtypes and shapes of an element.
        cardinality: The number of elements; negative if it is not known or infinite.
        seeds: Of everything that shuffles, from the end of the pipeline to its beginning.
    """

    structure: str
    cardinality: int
    seeds: tuple[tuple[int, ...], ...]


def check_order(dataset: tf.data.Dataset, call: str, process_set: ProcessSet | None = None) -> None:
    """Let a dataset pass that all ranks have alike. Every rank calls this, outside of tf.function.

    What generators and files hold is not looked at.

    Args:
        dataset: This rank's.
        call: What was called, for messages.
        process_set: The ranks that take part; all by default.

    Raises:
        ArgumentError: It shuffles in an order that differs between the ranks. Raised on all of them.
        MismatchError: The ranks' datasets have different elements, or different numbers of them. Raised on all of them.
    """
    if tf.inside_function():
        raise ArgumentError(f"{call} asks the other ranks: call it outside of tf.function.")
    own = _Order(repr(dataset.element_spec), int(dataset.cardinality()), tuple(seeds_of(dataset)))
    orders = hvdlite.allgather_object(own, process_set=process_set)
    for what, values in (
        ("elements", [order.structure for order in orders]),
        ("numbers of elements", [order.cardinality for order in orders]),
    ):
        if len(set(values)) > 1:
            raise MismatchError(f"{call}: the ranks' datasets have different {what}: {values} on ranks 0, 1, ….")
    unseeded = any(not any(seeds) for order in orders for seeds in order.seeds)
    if len(orders) > 1 and (unseeded or len({order.seeds for order in orders}) > 1):
        raise ArgumentError(
            f"{call}: the ranks shuffle this dataset in different orders, so rows would be lost: pass the same seed on every "
            "rank (dataset.shuffle(buffer_size, seed=1)), or call keras.utils.set_random_seed(1) before it is made."
        )


def seeds_of(dataset: Any) -> Iterator[tuple[int, ...]]:
    """The seeds of what changes the order, here and in all that this dataset reads from."""
    own = [int(getattr(dataset, name)) for name in ("_seed", "_seed2") if getattr(dataset, name, None) is not None]
    if own:
        yield tuple(own)
    for function in dataset._functions():
        definition = function.function.graph.as_graph_def()
        bodies = [definition.node, *(each.node_def for each in definition.library.function)]
        for node in (node for body in bodies for node in body if node.op == "RandomShuffle"):
            yield node.attr["seed"].i, node.attr["seed2"].i
    for source in dataset._inputs():
        yield from seeds_of(source)
