"""Arrays in nested dicts, lists and tuples, as a list; and back.

Containers of other kinds are JAX's affair: where that is loaded, it is asked about them (the modules of Flax, for example).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


class Flat(NamedTuple):
    """The leaves of a tree.

    Attributes:
        paths: Where each leaf is, such as ``['layers'][0]``; with the kinds of the containers, for comparisons, in `kinds`.
        leaves: Arrays, or None.
        kinds: The kind of each container on the way, in a text that is the same for equal structures.
        rebuild: Makes a tree of the same structure from other leaves.
    """

    paths: list[str]
    leaves: list[Any]
    kinds: str
    rebuild: Callable[[Sequence[Any]], Any]


def flatten(tree: Any) -> Flat:
    """The leaves of a tree, in an order that depends on its structure alone: those of a dict by the sorted keys."""
    kinds: list[str] = []
    found = list(_leaves(tree, "", kinds))
    if "jax" in sys.modules and any(leaf is not None and not hasattr(leaf, "dtype") for _, leaf in found):
        return _flatten_by_jax(tree)
    return Flat(
        [path for path, _ in found], [leaf for _, leaf in found], " ".join(kinds), lambda new: _build(tree, iter(new))
    )


def _leaves(tree: Any, path: str, kinds: list[str]) -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict | list | tuple):
        yield path, tree
        return
    kinds.append(f"{type(tree).__name__} of {len(tree)}")
    if isinstance(tree, dict):
        for key in _sorted(tree):
            yield from _leaves(tree[key], f"{path}[{key!r}]", kinds)
    else:
        for number, child in enumerate(tree):
            yield from _leaves(child, f"{path}[{number}]", kinds)


def _build(tree: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(tree, dict):
        found = copy.copy(tree)  # of its class, and in its order
        found.update({key: _build(tree[key], leaves) for key in _sorted(tree)})
        return found
    if isinstance(tree, list | tuple):
        children = [_build(child, leaves) for child in tree]
        return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)
    return next(leaves)


def _sorted(tree: dict[Any, Any]) -> list[Any]:
    try:
        return sorted(tree)
    except TypeError:  # keys of several classes
        return sorted(tree, key=lambda key: (type(key).__name__, repr(key)))


def _flatten_by_jax(tree: Any) -> Flat:
    util = sys.modules["jax"].tree_util
    # JAX takes None for a container of nothing; here a rank may have no gradient where another has one.
    found, structure = util.tree_flatten_with_path(tree, is_leaf=lambda node: node is None)
    paths = [util.keystr(path) for path, _ in found]
    return Flat(
        paths, [leaf for _, leaf in found], str(structure), lambda new: util.tree_unflatten(structure, list(new))
    )
