"""Optimizers under a strategy: gradients are exchanged before they are looked at, and in the memory where that is fastest.

Left alone, Keras clips, checks for overflow and accumulates each rank's own gradients, and asks the strategy for their sums
only then. So an optimizer is made a distributed one, as `hvdlite_tf.DistributedOptimizer` makes it, and the strategy adds
nothing while that applies what it has::

    gradients ─▶ × rows of this rank ÷ mean rows ─▶ sum over the ranks ─▶ clipping, update, …: Keras' own
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import hvdlite
from hvdlite.adapter.options import Options
from hvdlite.errors import ArgumentError, DistributedAlreadyError
from hvdlite_tf.gradients.exchange import GradientExchange
from hvdlite_tf.optimizers.tf_keras import is_tf_keras
from hvdlite_tf.optimizers.wrap import distribute
from hvdlite_tf.strategy.context import Replica

_MARK = "_hvdlite_strategy"


class StrategyExchange(GradientExchange):
    """Sums over the ranks, as Keras' losses under a strategy want them: each is divided by the number of ranks already.

    In a step of Keras, ranks count by their rows.

    Args:
        options: How gradients are exchanged.
        accumulates: The optimizer adds up gradients of several steps, each with rows of its own, before it has them combined.
    """

    def __init__(self, options: Options, accumulates: bool) -> None:
        super().__init__(options)
        self._accumulates = accumulates

    def fill(self, sources: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """As `GradientExchange.fill`: the gradients of one of several steps."""
        return super().fill(sources, _by_rows(gradients))

    def combine(self, sources: Sequence[Any], gradients: Sequence[Any], weight: Any = None) -> list[Any]:
        """As `GradientExchange.combine`."""
        return super().combine(sources, gradients if self._accumulates else _by_rows(gradients))


def prepare(optimizer: Any, strategy: tf.distribute.Strategy) -> Any:
    """Make an optimizer exchange gradients as the strategy wants it, if it does not yet. It is changed and returned.

    Raises:
        ArgumentError: It is no optimizer that is known, or a distributed one.
    """
    if getattr(optimizer, _MARK, None) is strategy:
        return optimizer
    options = Options(op=hvdlite.Sum)
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
    """Let the strategy leave gradients as they are while an optimizer of Keras 3 applies them."""
    plain_apply = optimizer.apply

    def apply(*args: Any, **kwargs: Any) -> Any:
        context = tf.distribute.get_replica_context()
        if not isinstance(context, Replica):
            raise ArgumentError("apply_gradients() of an optimizer under a strategy: call it within strategy.run().")
        with Replica(strategy, strategy.extended._rank, context.share, optimizes=True):
            return plain_apply(*args, **kwargs)

    # Not by plain assignment: Keras would look into it for variables.
    object.__setattr__(optimizer, "apply", tf.autograph.experimental.do_not_convert(apply))


def _by_rows(gradients: Sequence[Any]) -> list[Any]:
    """In a step of Keras, gradients times this rank's share of the rows. That costs nothing where the shares are even."""
    context = tf.distribute.get_replica_context()
    if not isinstance(context, Replica) or context.share is None:
        return list(gradients)
    scale = context.share.scale
    values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients]
    present = [tf.convert_to_tensor(each) for each in values if each is not None]
    if not present:
        return list(gradients)

    def scale_all() -> list[tf.Tensor]:
        # A rank without rows may have anything for a gradient.
        return [tf.math.multiply_no_nan(each, tf.cast(scale, each.dtype)) for each in present]

    scaled = iter(tf.cond(scale == 1, lambda: present, scale_all))
    found: list[Any] = []
    for gradient, value in zip(gradients, values, strict=True):
        new = None if value is None else next(scaled)
        if isinstance(gradient, tf.IndexedSlices):
            new = tf.IndexedSlices(new, gradient.indices, gradient.dense_shape)
        found.append(new)
    return found
