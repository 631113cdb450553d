"""One tree from the trees of all ranks, each of which has a part of the state."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from hvdlite.checkpoint.structure import Tree


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
