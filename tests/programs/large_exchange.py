"""Exchange 8 MiB again and again. After some times the last rank dies ("dies"), or makes the file that is named."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import hvdlite as hvd


def die() -> None:
    print(f"failing at {time.time()}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


hvd.init()
data = np.ones(2**21, np.float32)
for _ in range(3):
    hvd.allreduce(data)
if hvd.rank() == hvd.size() - 1:
    if sys.argv[1] == "dies":
        threading.Timer(0.01, die).start()
    else:
        Path(sys.argv[2]).touch()
while True:
    hvd.allreduce(data)
