"""A model whose layers are sliced over ranks (tensor parallelism), on torch's `DTensor`: `slice_layers`.

- `slice_layers`: `slice_layers`: slices what can be sliced, and prints the plan.
- `rules`: finds the layers of a model that can be sliced, and why others cannot.
- `state`: the state of the whole model, from the slices.
- `results`: the results of sliced layers as plain tensors.
- `attention`: an `nn.MultiheadAttention` whose heads are dealt out to ranks.
- `embedding`: an embedding whose rows or columns are dealt out to ranks.
- `convolution`: a convolution whose output channels are dealt out to ranks.
"""
