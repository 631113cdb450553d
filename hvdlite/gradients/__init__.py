"""A model's gradients in flat buffers, and how they become the combined gradients of all ranks.

- `layout`: where each gradient lies in flat memory; `header`: what each rank says with its gradients, summed over the ranks;
  `same_number`: how a sum shows that a number is the same on all ranks.
- `codec`: compresses and divides single gradients before they travel, and the reverse.
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

Gradients have the same layout on every rank by construction, so a step sends no control message. They lie in memory that
the ranks of a host share (`bucket`). Each rank sums its part of everybody's, in chunks that stay in its cache, and writes
the sums to everybody's memory. A large gradient of which no other rank reads anything is not copied: it is summed where the
framework left it. With ``shard=True`` nothing is written back. A rank steps its part of the parameters, which lie in one
memory for all ranks::

    rank 0                                                                   rank 1
    loss.backward()                                                          loss.backward()
      │ hook of each large parameter: copy it, while it is in the cache,        │
      ▼ if others read any of it                                                ▼
    ┌──────────────────────────┬──────────────────────────┐                  ┌────────┬────────┐
    │ part 0: gradients 0 … 4  │ part 1: gradients 4 … 9  │                  │ part 0 │ part 1 │
    └──────────────────────────┴──────────────────────────┘                  └────────┴────────┘
      │ optimizer.step(): copy the small ones at once, headers (who has a gradient, weight of this rank), meet
      ▼
    rank 0 sums parts 0 of all ranks, × weights ÷ their sum; rank 1 parts 1  (several hosts: then over the hosts)
      │ write to all ranks' memory, meet                 │ sharded: step part 0 of the parameters, meet
      ▼                                                  ▼
    the optimizer's own step reads p.grad              everybody sees the new parameters in the same memory

- Sums run in the order of the ranks, whoever makes them: every rank has the same bits, and every run.
- float16 and bfloat16 are accumulated as float32 and rounded once. Between hosts their sums travel in 16 bits, so the sum
  of each host is rounded too. An average whose sum does not fit is computed again, of scaled values (`weighted_sum`).
- The headers say who has a gradient, which gradients are sparse, and a digest of the learning rates and step counts. Where
  those differ, nothing is exchanged, and all ranks raise with each rank's values. A parameter that has a gradient nowhere
  keeps ``grad=None``. The rows of sparse gradients travel as named operations.
- What a program still holds of the last step is not overwritten: each rank has a second buffer (`result_buffers`), of which
  no page is there before it is used.
- With `overlap`, a thread exchanges buckets while the backward pass goes on. That is a speculation that nobody touches the
  gradients meanwhile: the thread exchanges copies, the step compares them bit for bit, and the header of the last bucket
  says whether the speculation has failed anywhere. The buckets are learned in the second step (`planner`), or searched for
  (`autotune`).
- A rank that has joined goes on to exchange nothing, in a thread for each optimizer, until the headers say that all have
  joined. Headers between hosts travel by a sum that does not block, so that these threads sleep while the others compute.
"""
