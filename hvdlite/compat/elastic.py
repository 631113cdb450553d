"""``horovod.tensorflow.elastic``, ``horovod.keras.elastic``: the names, as in `hvdlite.compat.common.elastic`."""

from __future__ import annotations

from hvdlite.compat.common.elastic import ObjectState, State, not_yet

__all__ = ["ObjectState", "State"]

run = not_yet("horovod.tensorflow.elastic", "run")
TensorFlowState = not_yet("horovod.tensorflow.elastic", "TensorFlowState")
TensorFlowKerasState = not_yet("horovod.tensorflow.elastic", "TensorFlowKerasState")
KerasState = not_yet("horovod.keras.elastic", "KerasState")
CommitStateCallback = not_yet("horovod.keras.elastic", "CommitStateCallback")
UpdateBatchStateCallback = not_yet("horovod.keras.elastic", "UpdateBatchStateCallback")
UpdateEpochStateCallback = not_yet("horovod.keras.elastic", "UpdateEpochStateCallback")
