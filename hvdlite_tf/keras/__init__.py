"""Horovod's Keras modules: ``import hvdlite_tf.keras as hvd``, for ``horovod.tensorflow.keras`` and ``horovod.keras``.

`hvdlite_tf` serves Keras too and has more names. This package is for programs that were written with Horovod's two Keras
modules. Its operations take numbers as well as tensors, and have fewer arguments. A function here takes the arguments of both
modules. Only ``DistributedOptimizer(num_groups, groups)`` and ``BestModelCheckpoint(mode, save_freq)`` have another position
here than in ``horovod.keras``: pass these by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvdlite import basics
from hvdlite.adapter import capabilities
from hvdlite.adapter.capabilities import *  # noqa: F403
from hvdlite.basics import *  # noqa: F403
from hvdlite_tf.keras import callbacks, elastic
from hvdlite_tf.keras.optimizers import DistributedOptimizer, PartialDistributedOptimizer
from hvdlite_tf.keras.saving import load_model
from hvdlite_tf.training.objects import allgather_object, broadcast_object
from hvdlite_tf.variables import is_installed, missing

if TYPE_CHECKING or is_installed():
    from hvdlite_tf.keras.values import allgather, allreduce, broadcast, reducescatter
    from hvdlite_tf.optimizers.v1 import broadcast_global_variables
    from hvdlite_tf.training.join import barrier, join
    from hvdlite_tf.training.state import broadcast_variables
else:
    from hvdlite import barrier
    from hvdlite_tf.training.objects import broadcast_eagerly as broadcast_variables
    from hvdlite_tf.training.objects import join_eagerly as join

    def __getattr__(name: str) -> Any:
        if name in _NAMES:
            raise missing(__name__, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "join",
    "load_model",
    "reducescatter",
]
__all__ += basics.__all__ + capabilities.__all__

if not TYPE_CHECKING and not is_installed():
    _NAMES = frozenset(__all__)
    __all__ = [name for name in __all__ if name in globals()]
