"""One tree from the trees of all ranks, each of which has a part of the state; and no tensor twice."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from typing import Any

from hvdlite.checkpoint.structure import Tree

Keys = tuple[Any, ...]


def merge(trees: Sequence[Tree]) -> Tree:
    """Return one tree that has what all ranks have.

    Dictionaries get the keys of all; pieces of tensors, and values that each rank has for itself (`Own`), are put together.
    Of everything else the first rank's counts.

    Args:
        trees: The tree of each rank, in the order of the ranks.
    """
    first = trees[0]
    if not all(isinstance(tree, dict) for tree in trees):
        return first
    for kind in ("$pieces", "$own"):
        if kind in first:
            return {**first, kind: [each for tree in trees for each in tree.get(kind, ())]}
    if "$dict" in first:
        pairs: dict[str, list[list[Any]]] = {}
        for key, value in (pair for tree in trees for pair in tree["$dict"]):
            pairs.setdefault(json.dumps(key), []).append([key, value])
        return {**first, "$dict": [[same[0][0], merge([value for _, value in same])] for same in pairs.values()]}
    if any(str(key).startswith("$") for key in first):
        return first
    keys = dict.fromkeys(key for tree in trees for key in tree)
    return {key: merge([tree[key] for tree in trees if key in tree]) for key in keys}


def own_part(value: Any, keys_before: Collection[Keys]) -> Any:
    """Return a value without the tensors that ranks before this one have, such as those of another replica of the model.

    Args:
        value: What a rank has.
        keys_before: `tensor_keys` of what the ranks before it have.
    """
    if not keys_before:
        return value

    def rest(value: Any, keys: Keys) -> Any:
        if type(value) is not dict:
            return value
        return {key: rest(each, (*keys, key)) for key, each in value.items() if (*keys, key) not in before}

    before = set(keys_before)
    return rest(value, ())


def tensor_keys(value: Any, keys: Keys = ()) -> list[Keys]:
    """Return the ways, from dictionary to dictionary, to the tensors in a value."""
    if type(value) is dict:
        return [found for key, each in value.items() for found in tensor_keys(each, (*keys, key))]
    return [keys] if hasattr(value, "shape") and hasattr(value, "dtype") else []


def what_is_missing(tree: Tree, name: str) -> str:
    """Return which tensor of a tree lacks some of its pieces, in words; an empty text if nothing is missing.

    Args:
        tree: What `merge` returned.
        name: What the tree is of, for the text.
    """
    if isinstance(tree, list):
        found = (what_is_missing(each, f"{name}[{number}]") for number, each in enumerate(tree))
    elif not isinstance(tree, dict):
        return ""
    elif "$pieces" in tree:
        wanted, there = math.prod(tree["shape"]), sum(stop - start for *_, start, stop in tree["$pieces"])
        return f"{name} has {there} of {wanted} elements" if there != wanted else ""
    elif "$dict" in tree:
        found = (what_is_missing(value, f"{name}[{key!r}]") for key, value in tree["$dict"])
    else:
        found = (what_is_missing(value, f"{name}[{key!r}]") for key, value in tree.items())
    return next(filter(None, found), "")
