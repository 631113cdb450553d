"""Elastic training with Keras, under the module name that Horovod uses. See `hvdlite_tf.elastic`."""

from __future__ import annotations

from hvdlite_tf.elastic import (
    CommitStateCallback,
    KerasState,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
    run,
)

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]
