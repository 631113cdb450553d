"""A strategy of `tf.distribute` whose replicas are the ranks of the job.

- `strategy`: the class `Strategy`, which recognizes the steps that Keras passes to `run`.
- `extended`: the methods of a strategy that TensorFlow and Keras call.
- `context`: the replica context that code within `run` sees.
- `losses`: the losses of all rows, as one process has them.
- `dataset`: datasets of global batches, of which each rank reads its rows.
- `variables`, `optimizers`: the variables and optimizers of a strategy.
"""

from hvdlite_tf.strategy.strategy import Strategy

__all__ = ["Strategy"]
