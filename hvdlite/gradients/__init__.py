"""A model's gradients in flat buffers, and how they become the combined gradients of all ranks.

- `sync`: the contract between a framework's step and the object that combines gradients.
- `layout`: where each gradient lies in flat memory; `header`: what each rank says with its gradients, summed over the ranks;
  `same_number`: how a sum shows that a number is the same on all ranks.
- `bucket`: one flat buffer on all ranks of a host, and its exchange.
- `ownership`: which elements a rank sums; `segments`: these elements in the memory of all ranks; `weighted_sum`: the sum.
- `result_buffers`: where gradients and results lie.
- `reducer`: all buckets of a model; `sharded_reducer`: each rank gets its shard of the sums.
- `reducers`: makes the reducers of a group of ranks; `shared_reducers`: those that ranks which have joined make as well.
- `aggregator`: a program's own way to combine a bucket.
- `overlap`: exchanges buckets while the backward pass runs.
- `planner`: how many buckets there are, and whether they travel early; `autotune`: searches for the fastest plan.
- `lossy`: aggregators that send few bytes, in a folder of its own.
- `device`: the same on the memory of a GPU, in a folder of its own.
"""
