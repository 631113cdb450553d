"""Horovod's operations on torch tensors.

- `allreduce`, `reducescatter`, `allgather`, `broadcast`, `alltoall`, `sparse`: the operations, in all their forms.
- `differentiable`: their gradients.
- `handles`: operations in flight.
- `join`: ranks wait for each other, and a rank that has no more data takes part.

The names, and the order and defaults of the arguments, are Horovod's. Blocking forms that return a new tensor are
differentiable, and so are those in place. Asynchronous ones are not, and take tensors that require a gradient as they take
others. Gradients are those of the sum of all ranks' losses.
"""
