"""The state of one rank: what the functions of `hvdlite.api` work on.

world.py  the job as this rank knows it, from `init` to `shutdown`
group.py  the ranks of one process set: their engine, and the exchanges of their gradients
"""
