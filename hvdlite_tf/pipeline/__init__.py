"""A Keras model whose stages are on different ranks, trained by `fit` in micro-batches: `Pipeline`, on TensorFlow.

- `pipeline`: `Pipeline`, a Keras model: a training step, evaluation, prediction.
- `stage`: forward and backward passes of this rank's stage; `batch` cuts batches, `values` go from rank to rank.
- `losses`: what the losses of micro-batches count in that of the batch.
- `joint`: one norm of the gradients over all stages, and overflows that all of them see.
- `checks`: what cannot be trained in micro-batches.
"""
