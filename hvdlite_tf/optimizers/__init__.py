"""Distributed optimizers and tapes.

- `wrap`: `DistributedOptimizer` for whatever it is given.
- `keras`: Keras 3; `tf_keras`: Keras 2 and its legacy optimizers; `v1`: TensorFlow 1; `backends`: what
  Keras 3 calls differently on torch and, in `on_tensorflow`, on TensorFlow.
- `summed_passes`: several passes added up, for the optimizers of tf_keras and TensorFlow 1.
- `tape`: `DistributedGradientTape`.
"""
