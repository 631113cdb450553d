"""Distributed optimizers and tapes.

- `wrap`: `DistributedOptimizer`, for optimizers of all kinds.
- `keras`: optimizers of Keras 3; `tf_keras`: optimizers of Keras 2, new and legacy ones; `v1`: optimizers of TensorFlow 1.
- `sharded`: each rank steps its share of the parameters, its `shards`; `shardable`: which optimizers can be;
  `shard_state`: their state as that of a plain one.
- `plain_class`: classes that look like those of Keras 3.
- `backends`: what an optimizer of Keras 3 needs of its backend, for torch, and in `on_tensorflow` for TensorFlow.
- `local_steps`: each rank steps by itself, and all ranks bring their parameters together at times (Keras 3).
- `summed_passes`: accumulates gradients over several passes, for the optimizers of tf_keras and TensorFlow 1.
- `tape`: `DistributedGradientTape`.
"""
