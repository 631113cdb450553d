"""Optimizers under a strategy, which exchange gradients before they clip, check and accumulate them.

By default Keras clips, checks for overflow and accumulates each rank's own gradients, and asks the strategy for sums only after
that. So the strategy makes an optimizer a distributed one, as `hvdlite_tf.DistributedOptimizer` does, and reduces nothing while
that optimizer applies its gradients::

    gradients ─▶ × rows of this rank ÷ mean rows ─▶ sum over the ranks ─▶ clipping, update, …: all as in Keras
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import hvdlite
from hvdlite.adapter.options import ExchangeOptions
from hvdlite.errors import ArgumentError, DistributedAlreadyError
from hvdlite_tf.gradients.exchange import GradientExchange
from hvdlite_tf.optimizers.tf_keras import is_tf_keras
from hvdlite_tf.optimizers.wrap import distribute
from hvdlite_tf.strategy.context import RankContext

_MARK = "_hvdlite_strategy"


class StrategyExchange(GradientExchange):
    """An exchange that sums gradients over the ranks, because Keras divides each rank's loss by the number of ranks already.

    In a step of Keras, each rank's gradients are weighted by its number of rows.

    Args:
        options: How the gradients are exchanged.
        accumulates: Whether the optimizer adds up the gradients of several steps before `combine`. Each step has its own number
            of rows, so `fill` weights the gradients then.
    """

    def __init__(self, options: ExchangeOptions, accumulates: bool) -> None:
        super().__init__(options)
        self._accumulates = accumulates

    def fill(self, sources: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """Weight and fill the gradients of one of several steps. See `GradientExchange.fill`."""
        return super().fill(sources, _by_rows(gradients))

    def combine(self, sources: Sequence[Any], gradients: Sequence[Any], weight: Any = None) -> list[Any]:
        """Combine the gradients over the ranks, weighted by rows. See `GradientExchange.combine`."""
        return super().combine(sources, gradients if self._accumulates else _by_rows(gradients))


def prepare(optimizer: Any, strategy: tf.distribute.Strategy) -> Any:
    """Make an optimizer exchange gradients by a `StrategyExchange`, if it does not yet. It is changed and returned.

    Raises:
        ArgumentError: `optimizer` is of an unknown kind, or a `DistributedOptimizer`.
    """
    if getattr(optimizer, _MARK, None) is strategy:
        return optimizer
    options = ExchangeOptions(op=hvdlite.Sum)
    try:
        distribute(optimizer, options)
    except DistributedAlreadyError:
        raise ArgumentError(
            "this optimizer exchanges gradients by itself (DistributedOptimizer), and under a strategy the strategy does: pass "
            "the plain optimizer to compile()."
        ) from None
    if is_tf_keras(optimizer):
        getattr(optimizer, "inner_optimizer", optimizer)._hvdlite_state.exchange = StrategyExchange(options, False)
    else:
        optimizer._hvdlite.exchange = StrategyExchange(options, bool(optimizer.gradient_accumulation_steps))
        _apply_alone(optimizer, strategy)
    object.__setattr__(optimizer, _MARK, strategy)
    return optimizer


def _apply_alone(optimizer: Any, strategy: tf.distribute.Strategy) -> None:
    """Keep the strategy from reducing gradients once more while an optimizer of Keras 3 applies them."""
    plain_apply = optimizer.apply

    def apply(*args: Any, **kwargs: Any) -> Any:
        context = tf.distribute.get_replica_context()
        if not isinstance(context, RankContext):
            raise ArgumentError("apply_gradients() of an optimizer under a strategy: call it within strategy.run().")
        with RankContext(strategy, strategy.extended.rank, context.share, optimizes=True):
            return plain_apply(*args, **kwargs)

    # A plain assignment would make Keras look for variables in it.
    object.__setattr__(optimizer, "apply", tf.autograph.experimental.do_not_convert(apply))


def _by_rows(gradients: Sequence[Any]) -> list[Any]:
    """Multiply gradients by `Share.scale` in a step of Keras. If the shares are even, nothing is computed."""
    context = tf.distribute.get_replica_context()
    if not isinstance(context, RankContext) or context.share is None:
        return list(gradients)
    scale = context.share.scale
    values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients]
    present = [tf.convert_to_tensor(each) for each in values if each is not None]
    if not present:
        return list(gradients)

    def scale_all() -> list[tf.Tensor]:
        # The gradients of a rank without rows may have any value, also NaN.
        return [tf.math.multiply_no_nan(each, tf.cast(scale, each.dtype)) for each in present]

    scaled = iter(tf.cond(scale == 1, lambda: present, scale_all))
    found: list[Any] = []
    for gradient, value in zip(gradients, values, strict=True):
        new = None if value is None else next(scaled)
        if isinstance(gradient, tf.IndexedSlices):
            new = tf.IndexedSlices(new, gradient.indices, gradient.dense_shape)
        found.append(new)
    return found
