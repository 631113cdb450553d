"""What happens around an optimizer's step.

- `exchange`: the base of all exchanges; `driver`: that of gradients: which step exchanges, and what a program may say of it;
  `batch_weight`: how many samples a rank has.
- `wrapped`: what is added to an optimizer's class; `typed`: what type checkers are told of it.
- `options`, `codec`: the arguments, checked; how gradients are compressed.
- `step_guard`, `closures`, `amp`, `fused`: steps within steps, closures, scaled losses, torch's fused steps.
- `shards`, `shard_state`, `sharded_step`, `shardable`: each rank steps its shard of the parameters.
- `own_parameters`: other weights for a while, on one rank.
- `lease`: what an optimizer holds beyond itself.
- `adasum`: changes of a step instead of gradients.
"""
