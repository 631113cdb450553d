"""What a program calls in the same order on all ranks of a group: collectives without names, and messages between two ranks.

Named operations (`hvdlite.operations.negotiation`) come in any order, and the ranks agree first. Programs for torch.distributed
or MPI promise the order themselves. So nothing is negotiated here; each call is only compared, and if the ranks call different
things, all of them raise an error that says what each has called.

- `communicator`: `Communicator`, one rank's end of a group; it can be made by the members of the group alone.
- `channel`: `isend` and `irecv` with the watchdog as the owner of every wait.
- `calls`: the queue of calls: the thread that waits runs them, or a thread in the background.
- `messages`: the thread that lets messages go on while the program computes.
- `comparison`: finds out whether all ranks call the same.

Before each call the ranks show each other a number that stands for it: in shared memory within a host, which takes a
meeting. Who waits for a call runs it, and those before it, in his own thread. A background thread runs what nobody waits
for: at once if each rank has a core to spare, else after a moment. Messages between two ranks are tested by a thread as
well, because MPI moves a large one only while it is called. A receive is handed to MPI when the size of its message is
known: Open MPI writes a longer message past the end of the array. So every test of a message that is not over looks for
those of all receives: the sender of another one may wait until it has gone.
"""
