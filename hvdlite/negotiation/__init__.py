"""Which operations are ready on all ranks, and in which order they run.

- `engine`: one rank's operations, from their submission to their result; `handle`: what the caller has of one meanwhile.
- `in_flight`: the operations that are not over; `waiters`: the threads that wait for them, and the one that drives the rest.
- `driver`: moves them on, a step at a time; `execution`: what has been decided is carried out.
- `controller`: what the root has heard of, and what it orders.
- `messages`: what the ranks send each other about it; `history`: what older messages need to be understood.
- `readiness`: who has submitted what; `blocked`: who waits, each for something that another has not submitted.
- `mismatch`: what differs between ranks, in words.
"""
