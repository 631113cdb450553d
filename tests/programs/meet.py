"""All ranks meet and print "ready". They wait for a file, if the argument names one, and meet again."""

import os
import sys
import time

from mpi4py import MPI

MPI.COMM_WORLD.Barrier()
print(f"ready {MPI.COMM_WORLD.rank} {os.getpid()} {os.getppid()}", flush=True)
if len(sys.argv) > 1:
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
MPI.COMM_WORLD.Barrier()
print(f"met {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}")
