"""How gradients become those of all ranks.

Each `…Sync` is a `hvdlite.gradients.sync.GradientSync`; what the optimizer steps with then is its `results`.

- `host`, `host_gradients`, `slot`, `large_gradients`, `small_gradients`: through host memory; `encoded`: compressed.
- `whole`: each rank gets all combined gradients; `host_sharded`: its shard.
- `adasum`: changes of a step instead of gradients.
- `device`, `device_sharded`: on GPUs, by `hvdlite.gradients.device`; `device_gradients`: parameters' gradients as views of its
  buckets; `backward`: what backward passes do with them; `gradient_state`: whether they have changed; `capture`: CUDA graphs.
- `sparse`: sparse gradients.
- `catch_up`: a rank that has no data takes part.
"""
