"""TCP connections of our own between hosts, for large data. MPI carries everything else, and makes these connections possible.

- `endpoint`: accepts connections of the job's ranks, and of nobody else, and makes connections to them.
- `meeting`: the ranks of a job agree on whether they use all this; those of a group connect to each other, or agree that they
  cannot.
- `links`: sends and receives arrays over the connections of one group.
- `collectives`: collectives of a group whose large data goes that way.
"""
