"""Host memory moved and reduced between the ranks.

- `mpi`, `mpi_collectives`: messages and collectives of MPI; `mpi_errors`: its errors as ours.
- `mpi_start`, `mpi_job`: how a process comes to MPI, and which job it is in.
- `local`: the same among threads of one process, over a network that is simulated.
- `messages`, `mailbox`: messages with tags, which do not block: what they take, and how threads exchange them.
- `channel`: such messages with the watchdog as the owner of every wait.
- `naps`: how a thread waits for other ranks.
- `point_to_point`: collectives on nothing but messages.
- `shared_memory`, `host`, `host_collectives`: memory that all ranks of a host see, how they meet there, and what they sum in
  it.
- `hierarchy`, `hierarchical`: first within each host, then between hosts.

Each module is imported only where it is used: MPI starts when `mpi` is imported.
"""
