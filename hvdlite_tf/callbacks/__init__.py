"""Callbacks for `fit` of Keras 3 and tf_keras: Horovod's, and `Distributed`, which combines those that most programs need::

    distributed.py ─┬─ start.py        gives all ranks the same weights at the start
                    ├─ elements.py     checks that all ranks have data of the same kind
                    ├─ uneven.py       lets ranks with different numbers of batches end each epoch together
                    └─ metrics.py      computes the metrics of all ranks' data

At the end of each epoch distributed.py stops training on all ranks or on none.

learning_rate.py has schedules and warm-up; checkpoint.py saves files on one rank; base.py has the base class for both Kerases;
checks.py has the checks before training; elastic.py commits the state of elastic training, and is in `hvdlite_tf.elastic`.
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
