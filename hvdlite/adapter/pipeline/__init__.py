"""What the pipelines of all frameworks share: a step is a list of passes on each rank, and messages between neighbours.

- `schedules`: the order of the passes of each rank.
- `messages`: values of any structure from one rank to another.
- `stages`: the ranks that have the layers of one model, and what they join: norms, overflows, states.
- `relay`: makes the passes of a rank; an error on one rank becomes an error on all.
- `weighing`: the loss of a batch from those of its micro-batches, and the share of each in the gradient.
- `bubble`: how much of a step the stages wait for each other.

A message says what it holds, so no shapes are inferred, and how many micro-batches its sender makes. A rank that fails goes
on to receive and to send, without computing: so nobody waits in vain, and at the end of the step all raise. What a loss
counts may be known after the first backward passes only: these are divided by what is expected, and the gradients of the
step corrected at its end (`weighing`).
"""
