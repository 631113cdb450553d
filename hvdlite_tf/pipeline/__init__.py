"""A Keras model whose stages are on different ranks, trained by `fit` in micro-batches: `Pipeline`, on TensorFlow.

- `pipeline`: `Pipeline`, a Keras model: a training step, evaluation, prediction.
- `stage`: forward and backward passes of this rank's stage.
- `messages`: tensors of any number and shape between neighbours.
- `checks`: what cannot be trained in micro-batches.
"""
