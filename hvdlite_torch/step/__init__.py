"""What happens around an optimizer's step.

- `driver`: what goes on before and after a step, in time; it has a `GradientSync` (`hvdlite_torch.sync`) and, if this rank
  steps a shard of the parameters, a `sharding`.
- `context`: what the parts of one optimizer share: its parameters, its ranks, its settings; `pending`: the step that comes;
  `batch_weight`: how many samples a rank has.
- `wrapped`: what is added to an optimizer's class; `typed`: what type checkers are told of it.
- `options`, `codec`: the arguments, checked; how gradients are compressed.
- `step_guard`, `closures`, `amp`, `fused`: steps within steps, closures, scaled losses, torch's fused steps.
- `sharding`, `shards`, `shard_state`, `shardable`: each rank steps its shard of the parameters, and has its state.
- `own_parameters`: other weights for a while, on one rank.
- `lease`: what an optimizer holds beyond itself.
"""
