"""Every rank prints its ranks and sizes, and the name of its host."""

import socket

import hvdlite as hvd

hvd.init()
numbers = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
print("place", *numbers, socket.gethostname(), flush=True)
hvd.barrier()
