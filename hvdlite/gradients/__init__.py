"""A model's gradients in flat buffers, and how they become those of all ranks.

- `layout`: which gradient lies where in which buffer.
- `header`: what each rank says of its gradients, summed with them.
- `bucket`: one buffer on all ranks of a host; `result_buffers`: its places; `segments`: what a rank sums of them.
- `reducer`: all buckets of an optimizer; `sharded_reducer`: each rank gets its shard of the sums.
- `reducers`: those of one group of ranks, which its ranks make together.
- `shared_reducers`: reducers that ranks which have joined make as well.
- `overlap`: buckets that travel while the backward pass runs.
- `plan`, `planner`: how many buckets, and whether they travel early; `autotune`: found by trying.
"""
