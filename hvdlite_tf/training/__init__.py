"""The functions that a training script calls besides its optimizer.

- `state`: sends variables from one rank to all; `objects`: sends variables and objects without TensorFlow.
- `sync_batch_norm`: batch normalization over the batches of all ranks.
- `join`: barrier and join, also in graphs.
"""
