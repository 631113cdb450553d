"""Training with a parameter server, for Keras 3: what `hvdlite.async_sgd.training` leaves to a framework.

- `optimizer`: `AsyncDistributedOptimizer`, and which optimizers fit (`checks`).
- `wrapped`: the methods that the optimizer gets; `training`: what they do on one rank.
- `served`: the model's variables and the number of steps as bytes; `replica`: those of a rank.
- `part`: a server's variables and their optimizer.
- `state`: what an optimizer has for some variables.
"""
