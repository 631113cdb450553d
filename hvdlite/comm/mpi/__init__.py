"""MPI as a medium.

- `start` loads MPI and finalises it; `job` finds out which processes are the job.
- `transport`, `collectives`: messages and collectives of MPI; `errors` maps MPI's errors to `CommunicationError`.

MPI starts when `transport` is imported.
"""
