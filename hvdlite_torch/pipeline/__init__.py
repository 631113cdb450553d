"""A model whose layers are on different ranks, trained in micro-batches: `Pipeline`, on ``torch.distributed.pipelining``.

- `pipeline`: `Pipeline`: a training step in one call, and evaluation.
- `stages`: cuts a model into the stages of this rank, by hand or by measurement.
- `costs`: measures the layers, and finds the cuts that balance the stages.
- `bubble`: how much of a step the stages wait for each other.
"""
