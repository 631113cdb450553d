"""Print how many seconds an allreduce of 8 MiB takes."""

import time

import numpy as np

import hvdlite as hvd

hvd.init()
data = np.ones(2**21, np.float32)
hvd.allreduce(data)
begun = time.monotonic()
hvd.allreduce(data)
print("took", time.monotonic() - begun)
