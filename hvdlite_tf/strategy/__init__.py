"""A strategy of `tf.distribute` whose replicas are the ranks of the job.

- `strategy`: `Strategy`; `extended`: its inside, which TensorFlow and Keras call; `context`: what code within `run` sees.
- `steps`: what Keras hands to `run`; `dataset`: datasets of global batches.
- `variables`, `optimizers`: those that are made under it.
"""

from hvdlite_tf.strategy.strategy import Strategy

__all__ = ["Strategy"]
