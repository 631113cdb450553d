"""Gradients that lie on a device, and how they become those of all ranks without leaving it.

- `rules`: what is the same for all buckets: how gradients are scaled, cast and cut into shares.
- `bucket`: gradients in flat tensors with a header behind them, and their exchange; `parameter_bucket`: with the parameters, of
  which each rank steps its share.
- `reducer`: the buckets of one layout, and in which order they are launched; `make`: how all ranks make them.
- `late_changes`: what the ranks come to know of each other without waiting.
- `loop_profile`: what a training loop does between two steps.

Nothing here knows a framework: tensors are worked on by `hvdlite.protocols.Device`.
"""
