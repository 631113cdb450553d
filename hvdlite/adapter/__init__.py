"""What an adapter for a framework is made of.

- `arguments`: Horovod's arguments in the terms of hvdlite.
- `capabilities`: what hvdlite can use here (MPI, NCCL, …).
- `distributed_gradient`, `tree`: `hvdlite.DistributedGradient`, for NumPy, JAX and whoever has no framework.
- `rows`: whose rows are whose, for the gradients of allgather and reducescatter.
- `options`: how gradients are exchanged, as a program says it.
- `array_sync`, `eager_sync`: gradients as arrays of any framework; `buckets`: their exchange, in host memory and on a device;
  `gradient_memory`: buckets, found again by their layouts.
- `identity`: which optimizer of one rank is which of another's.
- `advice`: what goes wrong quietly in a first step.
- `optional`: packages that an extra brings.
- `guide`: what to say where `hvdlite` is asked for what is in an adapter's package.
- `inner_class`: what stands for a class inside of Horovod that programs name.
"""
