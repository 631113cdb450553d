"""What sends fewer bytes, for optimizers of all frameworks.

- `aggregating`: aggregators that combine the gradients of one optimizer, in memory that all optimizers share.
- `local_steps`: how often ranks that train by themselves bring their parameters together, and how.
- `resumed`: which state of an aggregator a rank goes on from, if other ranks saved it.
"""
