"""torch's tensors and GPU memory for the core.

- `adapter`: reads and makes torch tensors; `device`: CUDA's streams and tensors.
- `gradient`: the dtype and shape of a parameter's gradients; `ownership`: who else uses the memory of a gradient.
- `sliced`: this rank's slices of `DTensor` parameters, their gradients and their optimizer state.
- `split`: who has which parameters of a model that is split, in slices or in stages; `split_norm`: torch's functions that clip
  gradients, over all slices and stages.
- `runs`: small tensors that lie side by side, which an optimizer steps as one.
- `malloc`: keeps freed memory for the next step, and lets large tensors lie in huge pages.
"""
