"""Which ranks there are, and what concerns the process of a rank, whatever it computes.

topology.py     the places of the ranks on their hosts
process_set.py  some of the ranks; grid.py: process sets for each axis of a grid
together.py     ranks that agree, or raise alike
own_core.py     keeps the ranks of a host on cores of their own while they wait for each other
memory_ways.py  the ways that this system allows for the memory of gradients
network.py      how other hosts may reach this one
log.py          says something to the people who run the job, as records of `logging`
"""
