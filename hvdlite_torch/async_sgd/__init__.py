"""Training with a parameter server, for torch: what `hvdlite.async_sgd.training` leaves to a framework.

- `optimizer`: `AsyncDistributedOptimizer`, and which optimizers fit (`checks`).
- `wrapped`: the methods that the optimizer gets; `typed`: the types that type checkers see.
- `training`: what the methods do on one rank.
- `layers`: lets each layer wait for its own new values.
- `hogwild`: what the methods do if the ranks share the memory of the parameters, without servers.
- `replica`: the parameters of a rank, and its gradients; `views`: bytes of messages as tensors.
- `sparse`: sparse gradients as rows, and which optimizers take them.
- `part`: a server's parameters and their optimizer; `settings`: the learning rates that travel with each push.
"""
