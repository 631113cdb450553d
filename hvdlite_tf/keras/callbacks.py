"""The callbacks of `hvdlite_tf.callbacks`, under the module name that Horovod uses."""

from hvdlite_tf.callbacks import (
    BestModelCheckpoint,
    BroadcastGlobalVariablesCallback,
    Distributed,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    UnevenDataCallback,
)

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "Distributed",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "UnevenDataCallback",
]
