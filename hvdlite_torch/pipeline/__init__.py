"""A model whose layers are on different ranks: `Pipeline`, and `Wavefront`, for recurrent layers.

- `pipeline`: `Pipeline`: a training step in one call, and evaluation.
- `stages`: cuts a model into stages, by hand or by measurement, and keeps those of this rank.
- `traced`: cuts a model that is no plain `nn.Sequential` by torch.export; `faithful`: refuses what that would leave out.
- `tied`: parameters that stages on several ranks have.
- `costs`: measures the layers, and finds the cuts that balance the stages.
- `wavefront`: `Wavefront`: recurrent layers, which take a sequence in chunks.
- `recurrent`: cuts stacks of recurrent layers.
- `own_layers`: parameters and state of the layers of this rank.
- `steps`: what both do in a step: `batch` cuts a batch, `passes` makes forward and backward passes of the parts, `losses`
  weighs their losses, `hooks` calls those of parameters; `values` are what goes from rank to rank.
"""
