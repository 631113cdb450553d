"""Rank 1 is killed while a process that it forked holds all its file descriptors open."""

import os
import signal
import time

from mpi4py import MPI

MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 1:
    if os.fork() == 0:
        time.sleep(600)
    print(f"failing at {time.time()}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
MPI.COMM_WORLD.Barrier()
