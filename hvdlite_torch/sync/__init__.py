"""How gradients become those of all ranks.

- `host`, `slot`, `large_gradients`, `small_gradients`: through host memory; `encoded`: compressed; `host_sharded`: each rank
  gets its shard.
- `device`, `device_sharded`: on GPUs, by `hvdlite.gradients.device`; `device_gradients`: parameters' gradients as views of its
  buckets; `backward`: what backward passes do with them; `gradient_state`: whether they have changed; `capture`: CUDA graphs.
- `sparse`: sparse gradients.
- `catch_up`: a rank that has no data takes part.
"""
