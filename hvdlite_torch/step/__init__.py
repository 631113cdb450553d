"""The work before and after each step of a distributed optimizer.

- `driver`: `StepDriver` runs before and after each step, also with closures. It has a `GradientSync`
  (`hvdlite_torch.sync`) and, if this rank steps a shard of the parameters, a `Sharding`.
- `gradient_sync`: the base of all syncs, and what an optimizer steps with.
- `context`: the state that the parts of one optimizer share; `pending`: the record of the program's calls for the next step,
  and the number of samples of this rank.
- `wrapped`: the methods that an optimizer's class gets; `typed`: the types that type checkers see.
- `options`: the checked arguments.
- `step_guard`: finds the outermost of nested steps; `amp`: scaled losses; `fused`: torch's
  fused steps.
- `sharding`: when this rank steps its shard; `shards`: the pieces of the shard; `stepped_groups`: the optimizer's groups
  with pieces in place of parameters; `shard_state`: the optimizer state of pieces; `shardable`: what can be sharded.
- `own_parameters`: gives one rank other weights for a while.
- `lease`: memory, channels, hooks and a thread that can outlive an optimizer.
"""
