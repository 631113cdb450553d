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
"""
