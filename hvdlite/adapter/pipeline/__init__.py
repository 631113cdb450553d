"""What the pipelines of all frameworks share: a step is a list of passes on each rank, and messages between neighbours.

- `schedules`: the order of the passes of each rank.
- `messages`: values of any structure from one rank to another.
- `stages`: the ranks that have the layers of one model, and what they join: norms, overflows, states.
- `relay`: makes the passes of a rank; an error on one rank becomes an error on all.
- `weighing`: the loss of a batch from those of its micro-batches, and the share of each in the gradient.
- `bubble`: how much of a step the stages wait for each other.
"""
