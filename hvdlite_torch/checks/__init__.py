"""Checks of what must be the same on all ranks, and warnings of mistakes that raise no error.

- `same_parameters`: compares the ranks when an optimizer is made; `in_step`: compares them at each step.
- `advice`: warns of ranks that start with different weights or read the same data; `clipping`: warns of clipping before the
  gradients are combined; `alone`: warns if the ranks have trained without communicating.
- `plain`: whether a module does what its class says and nothing else.
- `trial`: whether an optimizer steps each parameter by itself, which is known or tried out.
"""
