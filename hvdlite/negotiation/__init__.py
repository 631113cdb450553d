"""Which operations are ready on all ranks, and in which order they run.

- `engine`: one rank's operations, from their submission to their result; `handle`: what the caller has of one meanwhile.
- `controller`: what the root has heard of, and what it orders.
- `readiness`: who has submitted what; `messages`: what the ranks send each other about it.
- `mismatch`: what differs between ranks, in words.
"""
