"""Horovod's operations on TensorFlow's tensors.

- `allreduce`, `reducescatter`, `allgather`, `broadcast`, `alltoall`, `sparse`: the operations.
- `arguments`: what programs pass to the operations, as tensors.
- `differentiable`: the gradients of the operations.
- `ordered`: operations in graphs, in one order on all ranks.
- `failures`: exceptions of calls of Python, on their way to the program.
- `rank_ops`: ranks and sizes as tensors.

The core describes what each operation does: see the function of the same name in `hvdlite`. The functions here differ from it
in this:

- The names, the order and the defaults of the arguments are Horovod's. `device_dense` and `device_sparse` have no effect,
  because the ranks exchange tensors in host memory. `ignore_name_scope` has none either, because names here have no scope.
- A tensor may be a `tf.Tensor`, a variable, or a value that `tf.convert_to_tensor` takes. A list of such tensors is exchanged
  as one operation. Functions named ``grouped_…`` take a list (or other iterable) of any dtypes and shapes, and return a list.
- The functions work eagerly, in a tf.function and in a graph for a session. An error that is only seen when a graph runs is a
  `tf.errors.OpError` with the text of hvdlite's error.
- They are differentiable. A gradient is that of the sum of all ranks' losses, so every rank must compute it. It is an exchange
  whose own gradient is the operation that it belongs to::

      allgather ⟷ a sum, of which each rank keeps the rows that it contributed
      broadcast ⟷ a sum, which the root keeps
      alltoall  ⟷ an alltoall back to the senders
"""
