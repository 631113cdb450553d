"""Elastic training with Keras and TensorFlow: `run`, the states of a training, and callbacks for `fit`.

- `keras_state`: `TensorFlowKerasState`, of models. `variables_state`: `TensorFlowState`, of variables of TensorFlow.
"""

from __future__ import annotations

from hvdlite.elastic import HostsUpdatedInterrupt, ObjectState, State, run
from hvdlite_tf.callbacks.elastic import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback
from hvdlite_tf.elastic.keras_state import KerasState, TensorFlowKerasState
from hvdlite_tf.elastic.variables_state import TensorFlowState

__all__ = [
    "CommitStateCallback",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
