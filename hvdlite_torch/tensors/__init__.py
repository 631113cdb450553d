"""torch's tensors and GPU memory for the core.

- `adapter`: CPU tensors; `device`: CUDA's streams and tensors.
- `ownership`: who sees the memory of a gradient.
- `malloc`: glibc keeps what is freed.
"""
