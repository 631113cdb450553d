"""The processes that compute, on both sides of their sockets.

- `contract`: what the service wants of its replicas, and what they tell it.
- `devices`: which GPU each has.
- `fleet`: processes that are kept running; `process`: one of them, from its start to its end.
- `replica`: what runs in the process; `computing`: one batch there.
"""
