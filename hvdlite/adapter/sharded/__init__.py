"""``shard=True`` for frameworks whose tensors never change.

- `sync`: each rank gets its shard of the combined gradients, and gives all ranks the parameters that it has stepped;
  `buckets`: the memory for that.
"""
