"""A model whose layers are sliced over ranks (tensor parallelism), on torch's `DTensor`: `slice_layers`.

- `slice_layers`: `slice_layers`: slices what can be sliced, and prints the plan.
- `rules`: finds the layers of a model that can be sliced, and why others cannot.
- `results`: what goes into sliced layers and comes out of them, as plain tensors.
- `chains`: finds pairs of linear layers in the code of a forward pass.
- `transformers_models`: what is known of the models of Hugging Face's transformers.
- `whole`: what a program has done to a layer that slices would break.
- `linear`: linear layers of which each rank has columns or rows.
- `attention`: an `nn.MultiheadAttention` whose heads are dealt out to ranks.
- `embedding`: an embedding whose rows are dealt out to ranks.
- `convolution`: a convolution whose output channels are dealt out to ranks.
"""
