"""Horovod's names for elastic training, which hvdlite does not have yet: using one of these names raises NotYetError.

Importing them works, so that a program runs that does not use them.
"""

from __future__ import annotations

from hvdlite.errors import not_yet

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]

run = not_yet("hvdlite_tf.keras.elastic.run")
KerasState = not_yet("hvdlite_tf.keras.elastic.KerasState")
CommitStateCallback = not_yet("hvdlite_tf.keras.elastic.CommitStateCallback")
UpdateBatchStateCallback = not_yet("hvdlite_tf.keras.elastic.UpdateBatchStateCallback")
UpdateEpochStateCallback = not_yet("hvdlite_tf.keras.elastic.UpdateEpochStateCallback")
