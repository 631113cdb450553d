"""Datasets for several ranks.

- `shard`: a dataset dealt out to the ranks.
- `shuffle_check`: whether all ranks read it in the same order; `passes`: an order for each pass, the same on all ranks.
"""
