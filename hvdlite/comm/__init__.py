"""Host memory moved and reduced between the ranks.

- `mpi`: messages and collectives of MPI; `interrupt` ends their waits where ranks go on without others.
- `gpu`: collectives of NCCL, and those that go through host memory.
- `ordered`: what a program calls in the same order on all ranks: collectives without names, and messages.
- `sockets`: connections of our own, for large data between hosts.
- `local`: a transport among the threads of one process, over a simulated network.
- `messages`: the checks of `isend` and `irecv`; `mailbox`: how the threads of `local` exchange such messages.
- `naps`: how a thread waits for other ranks; `background`: a thread that does what nobody waits for.
- `point_to_point`: collectives made of messages alone.
- `shared_memory`: memory that all ranks of a host see; `host`: how the ranks of a host meet; `host_collectives`: how they
  reduce and move data through that memory; `ballot`: how they agree at once on something small.
- `hierarchy`: which ranks share a host; `hierarchical`: collectives within each host first, then between hosts;
  `between_hosts`: what the hosts have reduced becomes one.

Each module is imported only where it is used.

On one host an exchange is bound by memory traffic, so the fastest is the one that copies least. The ranks of a host share
memory that has no name (memfd, opened through /proc), so it needs no room in /dev/shm, and nothing of it can be left
behind. They meet by counters in it, which costs about a microsecond. Tensors of the user are shown block by block in slots,
used in turn, one meeting for each block. Where memory cannot be shared, every rank is a host of its own.

Ranks of different hosts send each other large data by TCP (`sockets`), everything else by MPI. `SocketCollectives` has the
contract of MPI's collectives, so whoever uses it does not know. A thread sends, the caller receives and sums, and both
sleep in the kernel; the watchdog ends such a wait by shutting the sockets down.
"""
