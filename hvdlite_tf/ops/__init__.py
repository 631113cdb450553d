"""Horovod's operations on TensorFlow's tensors.

- `allreduce`, `reducescatter`, `allgather`, `broadcast`, `alltoall`, `sparse`: the operations; `arguments`: theirs.
- `differentiable`: their gradients.
- `ordered`: operations in graphs, in one order on all ranks.
- `rank_ops`: who takes part, as tensors.

The names, and the order and defaults of the arguments, are Horovod's. They work eagerly, in a tf.function and in a graph for a
session, and are differentiable. Gradients are those of the sum of all ranks' losses. Each gradient is an exchange whose own
gradient is the operation that it belongs to::

    allgather ⟷ sum, of which each rank keeps the rows that it had given
    broadcast ⟷ sum, which the root keeps
    alltoall  ⟷ alltoall, back to the senders
"""
