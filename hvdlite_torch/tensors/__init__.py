"""torch's tensors and GPU memory for the core.

- `adapter`: CPU tensors; `device`: CUDA's streams and tensors.
- `gradient`: what the gradients of a parameter are like; `ownership`: who sees the memory of a gradient.
- `malloc`: glibc keeps what is freed.
"""
