"""Callbacks for `fit`, of Keras 3 and of tf_keras: Horovod's, and one that does the usual things at once::

    distributed.py ─┬─ start.py        the same start on every rank
                    ├─ elements.py     data of one kind
                    ├─ uneven.py       ranks with different numbers of batches end each epoch together
                    ├─ metrics.py      metrics of all ranks' data
                    └─ agreement.py    training stops on all ranks or on none

learning_rate.py has schedules and warm-up, checkpoint.py files on one rank; base.py has what both Kerases need, and checks.py
what is checked before training.
"""

from hvdlite_tf.callbacks.checkpoint import BestModelCheckpoint
from hvdlite_tf.callbacks.distributed import Distributed
from hvdlite_tf.callbacks.learning_rate import LearningRateScheduleCallback, LearningRateWarmupCallback
from hvdlite_tf.callbacks.metrics import MetricAverageCallback
from hvdlite_tf.callbacks.start import BroadcastGlobalVariablesCallback
from hvdlite_tf.callbacks.uneven import UnevenDataCallback

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "Distributed",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "UnevenDataCallback",
]
