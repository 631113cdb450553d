"""Horovod's names for training that goes on when ranks come and go. hvdlite does not have that yet: using one raises.

Importing them works, so that a program which only may use them runs.
"""

from __future__ import annotations

from hvdlite.errors import not_yet

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]

run = not_yet("hvdlite_tf.keras.elastic.run")
KerasState = not_yet("hvdlite_tf.keras.elastic.KerasState")
CommitStateCallback = not_yet("hvdlite_tf.keras.elastic.CommitStateCallback")
UpdateBatchStateCallback = not_yet("hvdlite_tf.keras.elastic.UpdateBatchStateCallback")
UpdateEpochStateCallback = not_yet("hvdlite_tf.keras.elastic.UpdateEpochStateCallback")
