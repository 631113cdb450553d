"""A strategy of `tf.distribute` whose replicas are the ranks of the job."""

from hvdlite_tf.strategy.strategy import Strategy

__all__ = ["Strategy"]
