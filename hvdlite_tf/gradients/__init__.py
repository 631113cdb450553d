"""From a tape to arrays that are exchanged, and back, in any graph.

- `exchange`: the gradients of one optimizer or tape, combined; `encoded`: what of a gradient is exchanged.
- `on_device`: eager tensors on a GPU, lent to the exchange and back.
- `accumulation`: several backward passes before a step; `local_variables`: variables that each rank has for itself.
- `optimizer_sync`: what every distributed optimizer has.
- `optimizer_parts`: what the Kerases call differently.

The arrays themselves are exchanged by `hvdlite.adapter.array_sync`.
"""
