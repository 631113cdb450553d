"""What the ranks must agree on, and what goes wrong quietly.

- `same_parameters`: when an optimizer is made; `in_step`: at each step.
- `in_effect`: an optimizer that was made before ``shutdown()``, and has no place in the present world yet.
- `advice`: ranks that start apart, or read the same data; `clipping`: clipping before the exchange; `alone`: ranks that have
  trained and told each other nothing.
"""
