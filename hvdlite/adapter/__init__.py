"""What an adapter for a framework is made of.

- `arguments`: Horovod's arguments in the terms of hvdlite.
- `capabilities`: what hvdlite can use here (MPI, NCCL, …).
- `optional`: packages that an extra brings.
- `inner_class`: what stands for a class inside of Horovod that programs name.
"""
