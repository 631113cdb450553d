"""Horovod's names for training that goes on when ranks come and go. hvdlite does not have that yet: using one raises.

Importing them works, so that a program which only may use them runs.
"""

from __future__ import annotations

from hvdlite.errors import not_yet

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]

run = not_yet("hvdlite_tf.elastic.run")
TensorFlowKerasState = not_yet("hvdlite_tf.elastic.TensorFlowKerasState")
TensorFlowState = not_yet("hvdlite_tf.elastic.TensorFlowState")
