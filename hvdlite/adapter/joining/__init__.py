"""What the ranks find out about each other's optimizers when all have joined.

- `follow`: which optimizer of one rank is which of another one.
"""
