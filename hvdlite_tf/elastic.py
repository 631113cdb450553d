"""Horovod's names for elastic training, which hvdlite does not have yet: using one of these names raises NotYetError.

Importing them works, so that a program runs that does not use them.
"""

from __future__ import annotations

from hvdlite.errors import not_yet

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]

run = not_yet("hvdlite_tf.elastic.run")
TensorFlowKerasState = not_yet("hvdlite_tf.elastic.TensorFlowKerasState")
TensorFlowState = not_yet("hvdlite_tf.elastic.TensorFlowState")
