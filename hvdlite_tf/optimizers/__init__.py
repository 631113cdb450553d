"""Distributed optimizers and tapes.

- `wrap`: `DistributedOptimizer` for whatever it is given.
- `keras`: Keras 3; `tf_keras`: Keras 2 and its legacy optimizers; `v1`: TensorFlow 1; `backends`: Keras on torch and JAX.
- `tape`: `DistributedGradientTape`.
"""
