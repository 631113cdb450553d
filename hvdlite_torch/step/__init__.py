"""What happens around an optimizer's step.

- `driver`: the base of all exchanges: which step exchanges, and what a program may say of it.
- `wrapped`: what is added to an optimizer's class; `typed`: what type checkers are told of it.
- `options`, `codec`: the arguments, checked; how gradients are compressed.
- `step_guard`, `closures`, `amp`, `fused`, `clipping`: steps within steps, closures, scaled losses, torch's fused steps,
  clipping.
- `same_parameters`, `in_step`: what ranks must agree on when an optimizer is made, and at each step.
- `advice`, `alone`: what goes wrong quietly.
- `shards`, `shard_state`, `sharded_step`, `shardable`: each rank steps its shard of the parameters.
- `own_parameters`: other weights for a while, on one rank.
- `lease`: what an optimizer holds beyond itself; `in_effect`: one that has no place in the present world.
- `adasum`: changes of a step instead of gradients.
"""
