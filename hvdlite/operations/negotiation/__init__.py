"""Which operations are ready on all ranks, and in which order they run.

A submitted operation goes through these files::

    engine ─ submit ─▶ in_flight ─▶ driver ─▶ controller ─ messages up and down the tree ─▶ driver ─▶ handle

- `engine`: the door of the room: submits the operations of one rank; the threads that wait for their results.
- `express`: a blocking operation that all ranks of a host call at about the same time needs none of the rest.
- `handle`: the caller's object for an operation that may not be over.
- `in_flight`: the operations that are not over.
- `driver`: one step of progress: announce, read messages, run operations in the order that was decided.
- `controller`: the ranks form a tree and agree on what is ready and in which order it runs.
- `messages`: the encoding of the control messages; `history`: past state that older messages refer to.
- `readiness`: the table of which rank has reported which operation, and ranks that all wait for one another.
- `mismatch`: the texts of errors about differences between ranks.

The ranks form a tree with eight children each. A rank reports an operation up when its program and all its children have
reported it; the root sends the order to run it down. An operation needs everybody, so a rank that has submitted nothing has
nothing to hear: its messages wait, and it polls nothing while it computes. Who waits for a handle drives the engine in his
own thread; a thread that naps drives what nobody waits for. Operations that are ready together and alike run as one
exchange. What was agreed once has a small number from then on, so the same batch as last time is a message of 25 bytes,
however many operations it has.

A blocking operation asks nobody if all ranks of the group share a host and call it at about the same time (`express`). The
ranks show each other in shared memory what they call. A rank that sees all others show the same is bound to it; a rank that
has waited for 0.3 ms withdraws, and the operation goes the way above. Either all ranks are bound or none is, whenever a
rank is stopped or interrupted (`hvdlite.comm.ballot`; its test stops and interrupts ranks at every access to that memory).
An allreduce or broadcast of up to 4 KiB is shown together with its data. A rank tries only if no operation of it is in
flight and no timeline is written, and after three times in vain only now and then.

If the signatures (kind, dtypes, shapes, arguments) differ, the root sends the same error to all. If every rank waits, each
for something that another has not submitted, that travels up the tree too (`readiness`), and all are told. This is apart from
the watchdogs' search for deadlocks on purpose. The root fails these operations by a plan, so the ranks stay in step: a
program may catch the error and go on. It also knows which threads use this very group, so it finds such a deadlock while
other threads compute.

A rank that has called `join` counts as having reported everything but a `Milestone` (`readiness`). What it did not submit
it learns from the plan, by number or with the signature, and runs it with `AbsentTensor` for tensors. While nobody has
joined, no message more is sent for all this. Memory for gradients that the others begin to exchange meanwhile it makes as
well, from the layout in their signature (`hvdlite.gradients.shared_reducers`). If an aggregator combines these gradients,
the signature has the number by which the ranks know it, and the rank takes part with its own.
"""
