"""All ranks meet. Then the last rank fails in the way that the first argument names, and the others wait for the last rank."""

import os
import signal
import sys
import time

import numpy as np

import hvdlite as hvd

how = sys.argv[1]
hvd.init()
hvd.allreduce(np.ones(3))
if hvd.rank() == hvd.size() - 1:
    print(f"failing at {time.time()}", flush=True)
    if how == "exception":
        raise ValueError("the reason of the last rank")
    os.kill(os.getpid(), getattr(signal, how))
hvd.allreduce(np.ones(3))
