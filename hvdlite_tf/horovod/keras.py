"""The names of ``horovod.keras`` under `hvdlite.compat` that differ from `hvdlite_tf.keras`. See `hvdlite_tf.horovod`."""

from __future__ import annotations

from hvdlite_tf.horovod import with_habits
from hvdlite_tf.horovod.operations import keras_allgather, keras_allreduce, keras_broadcast, keras_reducescatter
from hvdlite_tf.keras import optimizers as own

__all__ = [
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "reducescatter",
]

DistributedOptimizer = with_habits(own.DistributedOptimizer)
PartialDistributedOptimizer = with_habits(own.PartialDistributedOptimizer)
allgather, allreduce = keras_allgather, keras_allreduce
broadcast, reducescatter = keras_broadcast, keras_reducescatter
