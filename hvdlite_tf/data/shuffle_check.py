"""A check that all ranks read a dataset in the same order, so that their shares contain each row once.

A dataset that shuffles contains its seeds. Ranks with different seeds would take their shares from different orders: some rows
would be used twice, and others never.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

import hvdlite
from hvdlite import ProcessSet
from hvdlite.errors import ArgumentError, MismatchError

_SHUFFLING = {
    **dict.fromkeys(("ShuffleDataset", "ShuffleDatasetV3"), slice(2, 4)),
    **dict.fromkeys(("ShuffleAndRepeatDataset", "ShuffleAndRepeatDatasetV2"), slice(2, 4)),
    **dict.fromkeys(("RandomDataset", "RandomDatasetV2"), slice(0, 2)),
}
"""The operations that make datasets in random order, with the slice of their inputs that are seeds."""
_CHOOSING = {"FilterDataset", "TakeWhileDataset"}
"""The datasets whose functions decide which elements there are."""
_DRAWING = {
    *("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "ParameterizedTruncatedNormal"),
    *("RandomGamma", "RandomPoisson", "RandomPoissonV2", "Multinomial"),
}
"""The operations that draw random numbers. They matter if the numbers choose elements, or are sorted to give an order. Numbers
that only change values, such as those that flip images, may differ between ranks."""


class _Order(NamedTuple):
    """The properties of a dataset that decide the order of its rows.

    Attributes:
        structure: Dtypes and shapes of an element, as text.
        cardinality: The number of elements; negative if it is not known or infinite.
        seeds: The seeds of all shuffles, from the end of the pipeline to its beginning.
        loose: A description of a step whose order is not deterministic; "" if there is none.
    """

    structure: str
    cardinality: int
    seeds: tuple[tuple[int, ...], ...]
    loose: str


def check_order(dataset: tf.data.Dataset, call: str, process_set: ProcessSet | None = None) -> None:
    """Raise an error on all ranks if their datasets differ. Every rank calls this, outside of a tf.function.

    The contents of generators and files are not compared.

    Args:
        dataset: This rank's dataset.
        call: The function that the program called, for messages.
        process_set: The ranks that take part; None means all ranks.

    Raises:
        ArgumentError: The order of the dataset differs between the ranks. All ranks raise it.
        MismatchError: The elements of the ranks' datasets have different specs, or their numbers differ. All ranks raise it.
    """
    if tf.inside_function():
        raise ArgumentError(f"{call} asks the other ranks: call it outside of tf.function.")
    own = _Order(
        repr(dataset.element_spec), int(dataset.cardinality()), tuple(seeds_of(dataset)), _loose_part_of(dataset)
    )
    orders = hvdlite.allgather_object(own, process_set=process_set)
    for what, values in (
        ("elements", [order.structure for order in orders]),
        ("numbers of elements", [order.cardinality for order in orders]),
    ):
        if len(set(values)) > 1:
            raise MismatchError(
                f"{call}: the ranks' datasets have different {what}: {values} on ranks 0, 1, …. Every rank makes the same "
                "calls (fit, evaluate, predict, …) in the same order, with the same data."
            )
    loose = next((order.loose for order in orders if order.loose), "")
    if len(orders) > 1 and loose:
        raise ArgumentError(
            f"{call}: {loose} gives elements in an order that differs between the ranks, so rows would be lost: leave "
            "deterministic as it is, or say deterministic=True."
        )
    unseeded = any(not any(seeds) for order in orders for seeds in order.seeds)
    if len(orders) > 1 and (unseeded or len({order.seeds for order in orders}) > 1):
        raise ArgumentError(
            f"{call}: the ranks shuffle this dataset in different orders, so rows would be lost: pass the same seed on every "
            "rank (dataset.shuffle(buffer_size, seed=1)), or call keras.utils.set_random_seed(1) before it is made."
        )


def seeds_of(dataset: Any) -> Iterator[tuple[int, ...]]:
    """Yield the seeds of all steps that change the order, in a dataset and in all datasets that it reads from."""
    own = [int(getattr(dataset, name)) for name in ("_seed", "_seed2") if getattr(dataset, name, None) is not None]
    if own:
        yield tuple(own)
    chooses = type(dataset).__name__.lstrip("_") in _CHOOSING
    for body in _bodies(dataset):
        nodes = {node.name: node for node in body}
        shuffled = {name for node in body if node.op == "TopKV2" for name in _sources(node, nodes)}
        for node in body:
            if node.op == "RandomShuffle" or (node.op in _DRAWING and (chooses or node.name in shuffled)):
                yield node.attr["seed"].i, node.attr["seed2"].i
            elif node.op in _SHUFFLING:
                seeds = {_name(each) for each in node.input[_SHUFFLING[node.op]]} & nodes.keys()
                behind = sorted(seeds.union(*(_sources(nodes[name], nodes) for name in seeds)))
                found = tuple(value for value in (_constant(nodes[name]) for name in behind) if value is not None)
                if found:  # constants only, and not seeds that the program computes from its data
                    yield found
    for source in dataset._inputs():
        yield from seeds_of(source)


def _loose_part_of(dataset: Any) -> str:
    """Return a description of a step of a pipeline whose order is not deterministic; "" if there is none."""
    if dataset.options().deterministic is False:
        return "a dataset with options().deterministic=False"
    text = f"a {type(dataset).__name__.lstrip('_')} with deterministic=False"
    if getattr(dataset, "_deterministic", None) in (False, "false"):
        return text
    if any(node.attr["deterministic"].s == b"false" for body in _bodies(dataset) for node in body):
        return text
    return next(filter(None, map(_loose_part_of, dataset._inputs())), "")


def _bodies(dataset: Any) -> Iterator[list[Any]]:
    """Yield the nodes of each function that a dataset calls, directly or through other functions."""
    for function in dataset._functions():
        definition = function.function.graph.as_graph_def()
        yield list(definition.node)
        yield from (list(each.node_def) for each in definition.library.function)


def _sources(node: Any, nodes: dict[str, Any]) -> set[str]:
    """Return the names of all nodes of the same function from which a node is computed."""
    found: set[str] = set()
    to_do = [node]
    while to_do:
        new = {_name(each) for each in to_do.pop().input} & nodes.keys() - found
        found |= new
        to_do += [nodes[name] for name in new]
    return found


def _name(source: str) -> str:
    """Return the name of the node that an input comes from."""
    return source.lstrip("^").split(":")[0]


def _constant(node: Any) -> int | None:
    """Return the value of a node that is a constant integer scalar; None for any other node."""
    if node.op != "Const" or not tf.as_dtype(node.attr["dtype"].type).is_integer:
        return None
    value = tf.make_ndarray(node.attr["value"].tensor)
    return int(value) if value.ndim == 0 else None
