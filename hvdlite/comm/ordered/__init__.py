"""What a program calls in the same order on all ranks of a group: collectives without names, and messages between two ranks.

Named operations (`hvdlite.operations.negotiation`) come in any order, and the ranks agree first. Programs for torch.distributed
or MPI promise the order themselves. So nothing is negotiated here; each call is only compared, and if the ranks call different
things, all of them raise an error that says what each has called.

- `communicator`: `Communicator`, one rank's end of a group; it can be made by the members of the group alone.
- `channel`: `isend` and `irecv` with the watchdog as the owner of every wait.
- `calls`: the queue of calls: the thread that waits runs them, or a thread in the background.
- `messages`: the thread that lets messages go on while the program computes.
- `comparison`: finds out whether all ranks call the same.
"""
