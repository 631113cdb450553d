"""Gradients on a device, and how they become the combined gradients of all ranks without leaving the device.

- `rules`: how gradients are scaled, cast and cut into shares; the rules are the same for all buckets.
- `bucket`: gradients in flat tensors, and their exchange; also with the parameters, of which each rank steps its share.
- `tail`: what the ranks say to each other with their gradients.
- `reducer`: the buckets of one layout, and the order in which they are launched; `make`: makes buckets on all ranks together.
- `announced`: gradients that a program has all at once; the ranks exchange headers in host memory first.
- `late_changes`: what the ranks learn about each other without waiting.
- `loop_profile`: what a training loop does between two steps.

This package knows no framework: it works on tensors only through `hvdlite.protocols.Device`.

A bucket is flat memory of a `Device` with a small header behind it, and every rank launches every bucket once a step, in
the same order. What a framework adds is where a gradient comes from and what the result becomes: in torch these are hooks
and ``p.grad``.
"""
