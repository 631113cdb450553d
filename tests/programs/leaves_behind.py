"""Each rank leaves a process behind, in a session of its own. The parent of the process has ended, and it ignores SIGTERM."""

import os
import signal
import sys
import time

from mpi4py import MPI

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for descriptor in (0, 1, 2):
            os.close(descriptor)
        time.sleep(600)
    os._exit(0)
os.wait()
MPI.COMM_WORLD.Barrier()
print(f"ready {MPI.COMM_WORLD.rank} {os.getpid()} {os.getppid()}", flush=True)
if sys.argv[1] == "waits":
    time.sleep(600)
MPI.COMM_WORLD.Barrier()
