"""A model's gradients in flat buffers, and how they become those of all ranks.

- `layout`: which gradient lies where in which buffer.
- `header`: what each rank says of its gradients, summed with them.
- `bucket`: one flat buffer on all ranks of a host, and its exchange.
- `ownership`: what a rank sums of it; `segments`: that, with the memory of all ranks; `weighted_sum`: how it is summed.
- `result_buffers`: where gradients and results lie.
- `reducer`: all buckets of an optimizer; `sharded_reducer`: each rank gets its shard of the sums.
- `reducers`: those of one group of ranks, which its ranks make together.
- `shared_reducers`: reducers that ranks which have joined make as well.
- `aggregator`: a program's own way to combine a bucket.
- `sync`: what a framework's step asks of whatever combines gradients.
- `overlap`: buckets that travel while the backward pass runs.
- `device`: the same on a device, in a folder of its own.
- `plan`, `planner`: how many buckets, and whether they travel early; `autotune`: found by trying.
"""
