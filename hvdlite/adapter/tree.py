"""Converts nested dicts, lists and tuples of arrays to a flat list of arrays, and back.

If JAX is loaded, it converts containers of other kinds, such as the modules of Flax.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


class Flat(NamedTuple):
    """The leaves of a tree.

    Attributes:
        paths: The path of each leaf, such as ``['layers'][0]``. Trees with equal `paths` and `kinds` have the same structure.
        leaves: The leaves: arrays, or None.
        kinds: The kinds of all containers of the tree, in a text that is the same for equal structures.
        rebuild: A function that makes a tree of the same structure from other leaves.
    """

    paths: list[str]
    leaves: list[Any]
    kinds: str
    rebuild: Callable[[Sequence[Any]], Any]


def flatten(tree: Any) -> Flat:
    """Return the leaves of a tree, in an order that depends only on its structure: the keys of a dict are sorted."""
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
        found = copy.copy(tree)  # a dict of the same class, with its keys in the same order
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
    # JAX treats None as an empty container. Here None is a leaf: another rank may have a gradient there.
    found, structure = util.tree_flatten_with_path(tree, is_leaf=lambda node: node is None)
    paths = [util.keystr(path) for path, _ in found]
    return Flat(
        paths, [leaf for _, leaf in found], str(structure), lambda new: util.tree_unflatten(structure, list(new))
    )
