"""What a training script calls besides its optimizer.

- `state`: variables from one rank to all; `objects`: the same, and objects, without TensorFlow.
- `sync_batch_norm`: batch normalization over all ranks' batches.
- `join`: barrier and join.
"""
