"""Horovod's operations on torch tensors.

- `allreduce`, `reducescatter`, `allgather`, `broadcast`, `alltoall`, `sparse`: the operations, in all their forms.
- `differentiable`: their gradients.
- `handles`: operations in flight.
- `join`: ranks wait for each other, and a rank that has no more data takes part.

The core describes what each operation does: see the function of the same name in `hvdlite`. The functions here differ from it
in this:

- The names, the order and the defaults of the arguments are Horovod's.
- Blocking functions are differentiable, also those that overwrite their tensors. A gradient is that of the sum of all ranks'
  losses, so the backward pass communicates too, and every rank must run it.
- Asynchronous functions (``…_async``) return a `hvdlite.Handle` at once. `synchronize` waits for its result. They are not
  differentiable: they take tensors that require a gradient like other tensors.
- Functions whose name ends in an underscore overwrite their tensors.
- Functions named ``grouped_…`` take several tensors of any dtypes and shapes, exchange them as one, and return a list.
"""
