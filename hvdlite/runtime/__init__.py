"""The state of one rank: what the functions of `hvdlite.api` work on.

world.py  the job as this rank knows it, from `init` to `shutdown`
group.py  the ranks of one process set: their engine, and the exchanges of their gradients
pulse.py  what this rank tells its launcher once a second, if somebody looks at the job

A `Group` is what one rank has of a set of ranks: an `Engine` for named operations, the `Reducers` for gradients, and what
adapters have made to exchange gradients there. Its `Members` are a number and the world ranks. All ranks of the job count
the groups alike (`World` makes them by an `Agreement`), so the number is the same on all of them, and it is never used
twice in a job. The watchdog, the links and the GPU collectives know a group by this number, never by its ranks: two groups
of equal ranks are two groups. A `Group` ends with its job. What lives longer, such as an optimizer, looks the group up
again after `shutdown()` and `init()`.
"""
