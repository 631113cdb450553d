"""Datasets for several ranks.

- `shard`: gives each rank a part of a dataset.
- `shuffle_check`: checks that all ranks read a dataset in the same order.
- `passes`: shuffles a dataset in a new order for each pass, which is the same on all ranks.
"""
