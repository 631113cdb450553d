"""The functions that a training script calls besides its optimizer.

- `state`: sends parameters, buffers and optimizer state from one rank to all.
- `whole_state`: the state of an optimizer of a model that is split over ranks, as one process has it.
- `sync_batch_norm`: the BatchNorm layer over the batches of all ranks, and the conversion of a model to it.
- `global_batch_norm`: `F.batch_norm` over the batches of all ranks.
- `large_batch`: adapts the learning rate to a large batch.
- `in_sync`: checks that all ranks hold the same weights.
"""
