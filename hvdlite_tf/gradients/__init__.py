"""From a tape to arrays that are exchanged, and back, in any graph.

- `exchange`: the gradients of one optimizer or tape, combined; `encoded`: what of a gradient is exchanged.
- `array_exchange`, `gradient_memory`, `eager_exchange`: arrays of any framework, in the core's buckets.
- `accumulation`: several backward passes before a step; `local_variables`: variables that each rank has for itself.
- `identity`: which optimizer of one rank is which of another's; `optimizer_parts`: what the Kerases call differently.
- `advice`: what goes wrong quietly.
"""
