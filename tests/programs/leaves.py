"""Rank 1 leaves (or loops) in the way that the first argument names.

The others wait for rank 1 in the way that the second argument names.
"""

import sys
import time

import numpy as np

import hvdlite as hvd
from hvdlite.api import world
from hvdlite.protocols import TensorInfo

how, wait = sys.argv[1:]
hvd.init()
reducer = world().group().reducers.make([TensorInfo("float32", (1000,))])
hvd.barrier()
if hvd.rank() == 1:
    print(f"failing at {time.time()}", flush=True)
    if how == "exception":
        raise ValueError("the reason of rank 1")
    if how == "exit3":
        sys.exit(3)
    if how == "loop":
        while True:
            time.sleep(0.01)  # the line that rank 1 is on
    sys.exit(0)
if wait == "gradients":
    reducer.exchange([True])
else:
    hvd.allreduce(np.ones(3), name="the operation")
