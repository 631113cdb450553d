"""What a training script calls besides its optimizer.

- `state`: variables and optimizer state from one rank to all.
- `sync_batch_norm`: batch normalization over all ranks' batches.
- `join`: barrier and join.
"""
