"""`Losses`: the losses of the micro-batches of a step, and what each counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from hvdlite.adapter.pipeline.weighing import Counted, Weighing, check_mean
from hvdlite.errors import ArgumentError
from hvdlite_torch.pipeline.batch import length_of, part_of
from hvdlite_torch.pipeline.values import gradient_targets, nodes_below

Loss = Callable[[Any, Any], Any]
"""``loss(output, target)`` returns a mean, or a pair: a sum, and what it is to be divided by."""

_MEAN = 1
"""What torch's graph calls ``reduction="mean"``."""
_LINEAR = ("Mul", "Div", "Neg", "Add", "Sub", "ToCopy", "View", "Reshape", "Squeeze", "Unsqueeze")
"""Nodes of the graph through which a loss may go on its way from the mean to what the function returns."""

Target = tuple[torch.Tensor, Callable[[], torch.Tensor]]
"""A tensor with which a backward pass begins, and a function that returns its gradient then."""


class Losses:
    """The losses of one pipeline, on the rank of the last stage.

    Args:
        loss: The loss.
        reduction: "mean", or "sum" if the loss of a batch is the sum of its micro-batches'.
        dimension: That of the samples, in outputs and targets.
        over: What a mean is over, for texts.

    Attributes:
        weighing: The losses of this step.
        is_counted: Whether the loss says what it counts.
    """

    def __init__(self, loss: Loss, reduction: str, dimension: int, over: str) -> None:
        if reduction not in ("mean", "sum"):
            raise ArgumentError(f"reduction={reduction!r}: expected 'mean' or 'sum'.")
        own = getattr(loss, "reduction", reduction)
        if own == "batchmean":  # of KLDivLoss: over the samples, as torch recommends
            own = "mean"
        if own not in ("mean", "sum"):
            raise ArgumentError(f"the loss {type(loss).__name__} has reduction={own!r}: expected 'mean' or 'sum'.")
        self._loss, self._is_sum = loss, "sum" in (reduction, own)
        self._dimension, self._over = dimension, over
        self._steps = 0
        self.weighing, self.is_counted = Weighing(1), False

    def begin(self, parts: int, rows: int, leaves: Iterable[torch.Tensor]) -> None:
        """Begin a step.

        Args:
            parts: The number of micro-batches.
            rows: The number of samples.
            leaves: The tensors that get gradients: parameters of this rank, inputs, and targets.
        """
        self._parts, self._rows = parts, rows
        self._leaves = set(map(id, leaves))
        self._steps += 1
        self._checks = self._steps & (self._steps - 1) == 0 and parts > 1  # in the steps 1, 2, 4, 8, …
        self.weighing = Weighing(parts)
        self._said: str | None = None

    def __call__(self, part: int, output: Any, target: Any, rows: int) -> list[Target]:
        """Note the loss of a micro-batch, and return the tensors with which its backward pass begins.

        Args:
            part: The number of the micro-batch.
            output: The output of the model.
            target: The target.
            rows: How many samples there are.

        Raises:
            ArgumentError: The loss is no number; or it is no mean over the samples, and does not say what else.
        """
        ends = [each.grad_fn for each in gradient_targets(output)]  # a loss may change the output in place
        value, counted, kind = self._evaluate(output, target, rows)
        self._check_leaves(value, ends)
        if self._said not in (None, kind):
            raise ArgumentError(
                f"the loss returned {self._said} for one micro-batch, and {kind} for another: expected the same for all."
            )
        if self._said is None:
            self._said, self.is_counted = kind, kind != "a mean over samples"
            known = {"a mean over samples": float(self._rows), "a sum": 1.0}.get(kind)
            self.weighing = Weighing(self._parts, known)
        if self._checks and kind in ("a mean over samples", "a mean that is scaled"):
            self._checks = not self._check(output, target, rows, counted)
        self.weighing.add(counted)
        if not counted.divisor and not counted.is_sum:  # a mean over nothing, which is NaN
            return [(each, partial(torch.zeros_like, each)) for each in gradient_targets(output)]
        return [(value, lambda: torch.full_like(value, self.weighing.share(part)))] if value.requires_grad else []

    def _evaluate(self, output: Any, target: Any, rows: int) -> tuple[torch.Tensor, Counted, str]:
        """Return the loss of some samples; as a number and what it counts; and what kind of loss this is."""
        found = self._loss(output, target)
        if isinstance(found, tuple | list) and len(found) == 2:
            value, count = found
            self._check_number(value)
            return value, Counted(value.item(), float(count), is_sum=True), "a sum and its count"
        self._check_number(found)
        if self._is_sum:
            return found, Counted(found.item(), 1 / self._parts, is_sum=True), "a sum"
        count, is_plain = _count_of(found)
        if count is None:
            return found, Counted(found.item(), float(rows)), "a mean over samples"
        return found, Counted(found.item(), count), "a mean over targets" if is_plain else "a mean that is scaled"

    def _check_number(self, value: Any) -> None:
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ArgumentError(
                f"the loss returned {found}: expected a tensor with one number, or a pair of that and what it is divided by."
            )

    def _check_leaves(self, loss: torch.Tensor, ends: Sequence[Any]) -> None:
        """Raise if a loss trains something that no stage of this rank has.

        Args:
            loss: The loss.
            ends: Where the graph of the model begins.

        Raises:
            ArgumentError: It does.
        """
        found = [loss] if loss.is_leaf and loss.requires_grad else []
        found += [node.variable for node in nodes_below(loss, ends) if hasattr(node, "variable")]
        foreign = [leaf for leaf in found if id(leaf) not in self._leaves]
        if foreign:
            own = self._loss.named_parameters() if isinstance(self._loss, torch.nn.Module) else ()
            what = next((f"its parameter {name!r}" for name, parameter in own if parameter is foreign[0]), "a tensor")
            raise ArgumentError(
                f"the loss uses {what} of shape {tuple(foreign[0].shape)}, which requires a gradient and is no parameter of "
                "the last stage: nobody would train it, and weights of other stages are not up to date here. Let the last "
                "layer of the model have it, and return what the loss needs. For a penalty on weights call step(x, y), then "
                "penalty(pipeline.parameters()).backward() on each rank, then optimizer.step()."
            )

    def _check(self, output: Any, target: Any, rows: int, counted: Counted) -> bool:
        """Check that the loss of a micro-batch is the mean of its halves'. Return whether that could be checked."""
        if rows < 2 or length_of(output, self._dimension) != rows:
            return False
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            state = torch.get_rng_state()
            alone = part_of(output, rows, slice(0, rows), self._dimension, detached=True)
            try:
                halves = []
                for begin, end in ((0, rows // 2), (rows // 2, rows)):
                    mine, others = (
                        part_of(each, rows, slice(begin, end), self._dimension, detached=each is output)
                        for each in (output, target)
                    )
                    halves.append(self._evaluate(mine, others, end - begin)[1])
                torch.set_rng_state(state)
                again = [self._evaluate(alone, target, rows)[1].loss for _ in range(2)]
            except Exception:
                return False  # it takes micro-batches only
        if again[0] != again[1]:
            return True  # it is random
        advice = (
            f"Return a pair (sum, count), for a loss that is sum / count of the batch: for a mean over {self._over} that is "
            f"(loss * {'len(target)' if self._dimension == 0 else 'steps'}, "
            f"{'len(target)' if self._dimension == 0 else 'steps'}). "
            'Or give reduction="sum", if the loss of a batch is the sum of those of its parts.'
        )
        tolerance = torch.finfo(_precision(output)).eps ** 0.5
        check_mean(counted._replace(loss=again[0]), halves, tolerance, self._over, advice)
        return True


def _precision(output: Any) -> torch.dtype:
    dtypes = [each.dtype for each in gradient_targets(output) if each.dtype.is_floating_point]
    return max(dtypes or [torch.float32], key=lambda dtype: torch.finfo(dtype).eps)


def _count_of(loss: torch.Tensor) -> tuple[float | None, bool]:
    """Return what the mean of a cross-entropy of classes is over: targets that are not ignored, or the sum of their weights.

    torch's graph of the loss says that. The second result says whether the loss is this mean itself, or made of it. Without
    such a mean in the loss the first one is None.
    """
    counts: list[float] = []
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name()
        if name.startswith("NllLoss") and node._saved_reduction == _MEAN:
            counts.append(float(node._saved_total_weight))
        elif name.removeprefix("Unsafe").startswith(_LINEAR):
            nodes += [following for following, _ in node.next_functions]
    if len(set(counts)) != 1:
        return None, False
    assert loss.grad_fn is not None
    return counts[0], loss.grad_fn.name().startswith("NllLoss")
