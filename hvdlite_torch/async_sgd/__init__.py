"""Training with a parameter server: `hvdlite.async_sgd` for torch.

- `optimizer`: `AsyncDistributedOptimizer`, and the checks of its arguments (`options`).
- `wrapped`: the methods that the optimizer gets; `training`: what they do on one rank.
- `gradients`: adds up a worker's gradients for the next push; `views`: bytes of messages as tensors.
- `part`: a server's parameters and their optimizer; `settings`: the learning rates that travel with each push.
- `unfinished`: finishes at the end of the program what the program has not.
"""
