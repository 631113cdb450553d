"""How a job goes on when it loses ranks, or gets others.

- `elastic` tells the ranks of an elastic job what becomes of the hosts, and hears what they have committed.
- `survivors` lets the ranks of an elastic job go on in their processes when others fail.
- `trainings` goes on without ranks, or lets a rank save, where trainings with a parameter server want that.
"""
