"""The exchange of TensorFlow's gradients, in eager code, in a tf.function and in a graph of TensorFlow 1.

- `exchange`: combines the gradients of one optimizer or tape; `encoded`: gradients encoded for the exchange.
- `sharded_exchange`: gives each rank its shard of them, and gives all ranks the variables that each has stepped its shard of.
- `on_device`: shares the memory of eager tensors on a GPU with the exchange, and of its results with TensorFlow.
- `accumulation`: sums the gradients of several backward passes before a step; `local_variables`: variables that each rank has
  for itself.
- `optimizer_sync`: the part that all distributed optimizers have.
- `optimizer_parts`: the parts of an optimizer that the versions of Keras name differently.
- `own_variables`: which variables of an optimizer no rank gets from another one.
- `copies`: optimizers of the same class and settings for other variables; `stepped_alone`: whether such a one does the same.

`hvdlite.adapter.array_sync` exchanges the arrays of these gradients.

TensorFlow's tensors never change. So if ranks step shards, the parameters of each step go to other memory, of which there
are a few buffers in turn, and variables take this memory without a copy (`hvdlite.adapter.sharded`,
`sharded_exchange`).
"""
