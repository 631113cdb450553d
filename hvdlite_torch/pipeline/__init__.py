"""A model whose layers are on different ranks: `Pipeline`, on ``torch.distributed.pipelining``, and `Wavefront`.

- `pipeline`: `Pipeline`: a training step in one call, and evaluation.
- `stages`: cuts a model into stages, by hand or by measurement, and keeps those of this rank.
- `traced`: cuts a model that is no plain `nn.Sequential` by torch.export; `faithful`: refuses what that would leave out.
- `costs`: measures the layers, and finds the cuts that balance the stages.
- `bubble`: how much of a step the stages wait for each other.
- `wavefront`: `Wavefront`: recurrent layers, which take a sequence in chunks.
- `recurrent`: cuts stacks of recurrent layers.
- `chunk_stage`: forward and backward passes of chunks through the stage of this rank.
- `own_layers`: parameters and state of the layers of this rank.
"""
