"""What a training script calls besides its optimizer.

- `state`: parameters, buffers, optimizer state from one rank to all.
- `sync_batch_norm`: BatchNorm over all ranks' batches.
- `large_batch`: the learning rate of a large batch.
- `in_sync`: do all ranks hold the same weights?
"""
