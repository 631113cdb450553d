"""Horovod's place for the callbacks of `hvdlite_tf.callbacks`."""

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
