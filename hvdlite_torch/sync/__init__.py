"""How gradients become those of all ranks.

- `host`, `slot`, `large_gradients`, `small_gradients`: through host memory; `encoded`: compressed; `host_sharded`: each rank
  gets its shard.
- `device`, `device_bucket`, `device_sharded`: on GPUs.
- `late_changes`: what a program changes after a gradient has been sent; `loop_profile`: what a training loop does between
  steps.
- `sparse`: sparse gradients.
- `catch_up`: a rank that has no data takes part.
"""
