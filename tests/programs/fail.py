"""Two or more ranks meet. Then rank 1 ends in the way that the first argument names, and the others wait for rank 1."""

import ctypes
import os
import signal
import sys
import time

from mpi4py import MPI


def deepest() -> None:
    raise ValueError("the reason of rank 1")


comm = MPI.COMM_WORLD
comm.Barrier()
if comm.rank == 1:
    print(f"failing at {time.time()}", flush=True)
    os.write(1, b"last words without newline")
    how = sys.argv[1]
    if how == "exception":
        deepest()
    elif how == "exit3":
        sys.exit(3)
    elif how == "exit-message":
        sys.exit("the message of rank 1")
    elif how == "segfault":
        ctypes.string_at(0)
    elif how == "_exit7":
        os._exit(7)
    elif how == "_exit0":
        os._exit(0)
    elif how == "abort":
        comm.Abort(5)
    else:
        os.kill(os.getpid(), getattr(signal, how))
comm.Barrier()
