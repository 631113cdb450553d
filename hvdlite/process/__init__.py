"""What concerns the process of a rank, whatever it computes.

own_core.py     keeps the ranks of a host on cores of their own while they wait for each other
memory_ways.py  the ways that this system allows for the memory of gradients
network.py      how other hosts may reach this one
log.py          says something to the people who run the job, as records of `logging`
"""
