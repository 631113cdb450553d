"""`MicroBatches`: a batch in micro-batches, or a batch of sequences in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from hvdlite.errors import ArgumentError
from hvdlite_torch.pipeline.values import wants_gradient


class MicroBatches:
    """The inputs and targets of a step, cut along a dimension into parts of nearly equal size.

    Args:
        inputs: The positional arguments of the model.
        keywords: Its keyword arguments.
        target: What the loss is given.
        parts: How many parts there are at most.
        dimension: The dimension along which tensors are cut. Those that are 1 long in it, or have no dimensions, are given
            whole to each part.
        trains: Whether inputs that require gradients get them.

    Attributes:
        rows: The length of the dimension.
        parts: The number of parts.
        rows_of: The length of each part.

    Raises:
        ArgumentError: The tensors have different lengths, or there is nothing to cut.
    """

    def __init__(
        self,
        inputs: tuple[Any, ...],
        keywords: Mapping[str, Any],
        target: Any,
        parts: int,
        dimension: int = 0,
        trains: bool = True,
    ) -> None:
        whole = (inputs, dict(keywords), target)
        self.rows = _common_length(whole, dimension)
        self.parts = min(parts, self.rows)
        short, longer = divmod(self.rows, self.parts)
        self.rows_of = [short + (number < longer) for number in range(self.parts)]
        bounds = [0, *accumulate(self.rows_of)]
        self._cut = [part_of(whole, self.rows, slice(a, b), dimension) for a, b in pairwise(bounds)]
        self._dimension = dimension
        self._wanting = [leaf for leaf in tree_flatten(whole)[0] if trains and wants_gradient(leaf)]
        self._leaves: list[list[torch.Tensor]] = []
        if self._wanting:
            self._cut = [self._with_leaves(part) for part in self._cut]

    def _with_leaves(self, part: Any) -> Any:
        """Return a part with leaves of autograd's graph where gradients are wanted, so that parts go back one by one."""
        leaves: list[torch.Tensor] = []

        def leaf(value: Any) -> Any:
            if not wants_gradient(value):
                return value
            leaves.append(value.detach().requires_grad_())
            return leaves[-1]

        part = tree_map(leaf, part)
        self._leaves.append(leaves)
        return part

    @property
    def wants_gradients(self) -> bool:
        """Whether an input or a target requires a gradient."""
        return bool(self._wanting)

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The parts of inputs and targets that get gradients."""
        return [leaf for leaves in self._leaves for leaf in leaves]

    def __getitem__(self, part: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Return the inputs, the keyword arguments and the target of a part."""
        inputs, keywords, target = self._cut[part]
        return inputs, keywords, target

    def gradients(self, factor: float) -> list[torch.Tensor]:
        """Return the gradients that the stages of this rank have given to inputs and targets, each as long as the whole."""
        found = []
        for number, whole in enumerate(self._wanting):
            parts = [leaves[number] for leaves in self._leaves]
            each = [torch.zeros_like(part) if part.grad is None else part.grad for part in parts]
            is_cut = whole.dim() > self._dimension and whole.shape[self._dimension] == self.rows
            found.append(factor * (torch.cat(each, self._dimension) if is_cut else torch.stack(each).sum(0)))
        return found

    def give(self, gradients: list[torch.Tensor]) -> None:
        """Add gradients to those of inputs and targets, or let them go on to what these were computed from."""
        torch.autograd.backward(self._wanting, gradients)


def length_of(values: Any, dimension: int) -> int:
    """Return the length of the first tensor that has the dimension, or 0 if there is none."""
    for leaf in tree_flatten(values)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > dimension:
            return leaf.shape[dimension]
    return 0


def part_of(values: Any, rows: int, part: slice, dimension: int, detached: bool = False) -> Any:
    """Return some rows of each tensor that has so many.

    Args:
        values: Nested tensors.
        rows: How many rows they have.
        part: The rows.
        dimension: The dimension of the rows.
        detached: Whether to return leaves of a graph of their own.
    """

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim() > dimension and value.shape[dimension] == rows:
            value = value.narrow(dimension, part.start, part.stop - part.start)
        return value.detach().requires_grad_(value.requires_grad) if detached else value

    return tree_map(cut, values)


def _common_length(whole: Any, dimension: int) -> int:
    tensors = [leaf for leaf in tree_flatten(whole)[0] if isinstance(leaf, torch.Tensor)]
    lengths = [tensor.shape[dimension] for tensor in tensors if tensor.dim() > dimension]
    if not lengths or 0 in lengths:
        raise ArgumentError(
            f"there are no samples in this batch: its tensors have the shapes {[tuple(t.shape) for t in tensors]}. Leave it "
            "out."
        )
    rows = max(lengths)
    odd = [
        tuple(tensor.shape)
        for tensor in tensors
        if tensor.dim() > dimension and tensor.shape[dimension] not in (1, rows)
    ]
    if odd:
        raise ArgumentError(
            f"the tensors of a batch have different numbers of samples: {rows}, and {', '.join(map(str, odd))}. Expected the "
            f"same in dimension {dimension} of all inputs and targets, or 1 for what is the same for all samples."
        )
    return rows
