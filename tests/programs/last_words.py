"""Rank 0 fails, and the report of the failure fails too.

The report fails in sys.excepthook, or in a signal handler like torch's handler for a killed data loader.
"""

import os
import signal
import sys
import time

import numpy as np

import hvdlite as hvd


def broken_hook(*_: object) -> None:
    raise RuntimeError("the hook is broken")


def broken_handler(*_: object) -> None:
    raise RuntimeError("a worker was killed")


how = sys.argv[1]
if how == "hook":
    sys.excepthook = broken_hook
hvd.init()
if hvd.rank() == 0:
    print(f"failing at {time.time()}", flush=True)
    if how == "signals":  # again and again, as if many data loaders end
        signal.signal(signal.SIGALRM, broken_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.003)
        while True:
            os.getpid()
    raise ValueError("the reason")
hvd.allreduce(np.ones(3))
