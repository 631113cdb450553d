"""`Shares`: what the losses of micro-batches count in the loss of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from hvdlite.adapter.pipeline.weighing import Counted, check_mean
from hvdlite.errors import ArgumentError
from hvdlite_tf.pipeline.batch import length_of, part_of

_MEANS = ("sum_over_batch_size", "mean")
_ROWS, _SUM, _WEIGHTS, _VALID = "samples", "a sum", "sample weights", "samples that are not ignored"


class Shares:
    """What the losses of one compiled model count.

    Args:
        model: The model.
        parts: How many micro-batches there are.

    Raises:
        ArgumentError: The loss of a batch does not follow from those of its micro-batches.
    """

    def __init__(self, model: keras.Model, parts: int) -> None:
        self._losses = [loss for loss in keras.tree.flatten(model.loss) if loss is not None]
        self._parts = parts
        self._looks = 0
        self._is_sum: bool | None = None
        """Whether a loss that is one number for a micro-batch is a sum; None while nobody knows."""
        kinds = {_kind_of(loss) for loss in self._losses} or {_ROWS}
        if len(kinds) > 1 or (_VALID in kinds and len(self._losses) > 1):
            raise ArgumentError(
                f"Pipeline: the losses count {' and '.join(sorted(kinds))}: the loss of a batch does not follow from those of "
                "its micro-batches, so expected one kind of reduction for all losses, and ignore_class for a single one."
            )
        (self.kind,) = kinds

    def count(self, y: Any, weights: Any, rows: int) -> float:
        """Return what the loss of some samples is a mean over. The ranks have the same data, and need not ask each other."""
        if self.kind == _VALID:
            return float(np.sum(np.asarray(keras.tree.flatten(y)[0]) != self._losses[0].ignore_class))
        if self.kind == _WEIGHTS and weights is not None:
            each = {float(np.sum(np.asarray(weight))) for weight in keras.tree.flatten(weights)}
            if len(each) > 1:
                raise ArgumentError(
                    "Pipeline: mean_with_sample_weight with other sample weights for each output: the loss of a batch does not "
                    "follow from those of its micro-batches. Give all outputs the same."
                )
            return each.pop()
        return float(rows)

    @property
    def is_counted(self) -> bool:
        """Whether the loss is a mean over something else than samples."""
        return self.kind in (_VALID, _WEIGHTS)

    @property
    def is_sum(self) -> bool:
        """Whether the loss of a batch is the sum of those of its micro-batches."""
        return self.kind == _SUM or bool(self._is_sum)

    def look(self, loss: Callable[[Any, Any, Any], Any], y: Any, output: Any, weights: Any) -> None:
        """Look whether a loss that is one number for a micro-batch is a mean over its samples, or a sum.

        Keras' own losses give a number for each sample, which Keras reduces. A function that reduces them itself does not say
        how. It is looked at in the steps 1, 2, 4, 8, …

        Args:
            loss: Returns the loss of some samples from their targets, outputs and weights.
            y, output, weights: Those of a micro-batch.

        Raises:
            ArgumentError: It is neither.
        """
        if self.kind != _ROWS or self._parts == 1 or all(map(_is_own, self._losses)):
            return
        self._looks += 1
        if self._looks & (self._looks - 1):
            return
        if len(self._losses) > 1:
            _refuse_numbers(self._losses, y, output)
            return
        if not _is_number(self._losses[0], y, output):
            return
        rows = length_of(output)
        if rows < 2:  # the next micro-batch may have more
            self._looks -= 1
            return
        whole = Counted(float(loss(y, output, weights)), rows)
        halves = [
            Counted(float(loss(*part_of((y, output, weights), a, b))), b - a)
            for a, b in ((0, rows // 2), (rows // 2, rows))
        ]
        size = max(abs(whole.loss), *(abs(half.loss) for half in halves))
        tolerance = np.finfo(keras.config.floatx()).eps ** 0.5
        adds_up = abs(whole.loss - math.fsum(half.loss for half in halves)) <= tolerance * size
        if self._is_sum is None and size:
            self._is_sum = bool(adds_up)
        if not adds_up:
            check_mean(whole, halves, tolerance, "samples", _ADVICE)


_ADVICE = (
    "Return one number for each sample, as Keras' losses do; for masks pass a sample_weight, with a loss of the reduction "
    "'mean_with_sample_weight'."
)


def _kind_of(loss: Any) -> str:
    reduction = getattr(loss, "reduction", _MEANS[0])
    ignores = getattr(loss, "ignore_class", None) is not None
    if reduction in _MEANS:
        return _VALID if ignores else _ROWS
    if reduction == "sum":
        return _SUM
    if reduction == "mean_with_sample_weight" and not ignores:
        return _WEIGHTS
    raise ArgumentError(
        f"Pipeline: a loss with reduction {reduction!r}{' and ignore_class' if ignores else ''}: the loss of a batch must "
        "follow from those of its micro-batches. Expected sum_over_batch_size, mean, sum, or mean_with_sample_weight."
    )


def _is_own(loss: Any) -> bool:
    """Return whether a loss is one of Keras."""
    kind = loss if callable(loss) and hasattr(loss, "__name__") else type(loss)
    return isinstance(loss, str) or str(getattr(kind, "__module__", "")).startswith("keras.")


def _is_number(loss: Any, y: Any, output: Any) -> bool:
    call = loss.call if isinstance(loss, keras.losses.Loss) else loss
    return tuple(keras.ops.shape(call(keras.ops.convert_to_tensor(y), output))) == ()


def _refuse_numbers(losses: list[Any], y: Any, output: Any) -> None:
    """Raise for losses that reduce their samples themselves, of a model with several."""
    targets, outputs = keras.tree.flatten(y), keras.tree.flatten(output)
    if len(losses) != len(targets) or len(losses) != len(outputs):
        return
    for loss, target, each in zip(losses, targets, outputs, strict=True):
        if not _is_own(loss) and _is_number(loss, target, each):
            raise ArgumentError(
                f"Pipeline: one of {len(losses)} losses is one number for a micro-batch: nobody knows whether the loss of a "
                f"batch is the mean or the sum. {_ADVICE}"
            )
