"""`check_shardable`: which optimizers of Keras 3 can be sharded, and whether their variables may be cut in two."""

from __future__ import annotations

from typing import Any

import keras

import hvdlite
from hvdlite.adapter.options import ExchangeOptions
from hvdlite.errors import ArgumentError
from hvdlite.gradients.aggregator import name_of
from hvdlite_tf.gradients.stepped_alone import VARIABLEWISE, differs_alone, steps_each_alone


def check_shardable(optimizer: Any, options: ExchangeOptions) -> bool:
    """Raise an error if an optimizer cannot be sharded.

    Args:
        optimizer: The optimizer, which is not distributed yet: the one inside a LossScaleOptimizer.
        options: How the gradients are exchanged.

    Returns:
        Whether variables must be dealt out whole; otherwise they may be cut in two.

    Raises:
        ArgumentError: The optimizer cannot be sharded, or other arguments do not fit.
    """
    options.refuse(
        "shard=True",
        "each rank steps a share of the parameters with the combined gradients, in full precision",
        op=options.op if options.op is hvdlite.Adasum else None,
        compression=options.compressor_name,
        aggregator=None if options.aggregator is None else name_of(options.aggregator),
        local_steps=options.local_steps,
    )
    kind = optimizer.__class__
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        raise ArgumentError(
            "a MultiOptimizer cannot be sharded: it chooses optimizers by the variables of the model, and a sharded optimizer "
            "has pieces of them. Leave out shard=True."
        )
    if optimizer.built:
        raise ArgumentError(
            f"shard=True: this {kind.__name__} has been used, or built for its variables, so each rank has all of its state. "
            "Wrap it before; and load a saved state afterwards, on all ranks: model.compile(hvd.DistributedOptimizer(…, "
            "shard=True)), optimizer.build(model.trainable_variables), and model.load_weights(file) or hvd.checkpoint.load(…)."
        )
    if steps_each_alone(optimizer):
        return kind in VARIABLEWISE
    if kind is getattr(keras.optimizers, "ScheduleFreeAdamW", None):
        raise ArgumentError(
            "ScheduleFreeAdamW cannot be sharded: its state begins with the values of the variables, and a rank that has a "
            "share of the state would have its own initial values there. Leave out shard=True."
        )
    changed = next(
        (name for name in ("apply", "_backend_update_step", "_clip_gradients") if _overrides(kind, name)), None
    )
    difference = f"it has a method {changed} of its own" if changed else differs_alone(optimizer)
    if difference:
        raise ArgumentError(
            f"{kind.__name__} cannot be sharded, because it does not step each variable by itself: {difference}. Leave out "
            "shard=True."
        )
    return True


def _overrides(kind: type, name: str) -> bool:
    """Return whether a class that is not Keras' own has a method that Keras has."""
    return any(name in vars(base) for base in kind.__mro__ if base.__module__.partition(".")[0] != "keras")
