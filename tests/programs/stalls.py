"""Rank 2 does not come to the second operation, in the way of the first argument, until the second one, a file, is there."""

import os
import sys
import time

import numpy as np

import hvdlite as hvd

how, release = sys.argv[1:]


def wait_for_release() -> None:
    while not os.path.exists(release):
        time.sleep(0.01)  # the line that rank 2 is on


hvd.init()
hvd.allreduce(np.ones(3), name="first")
if hvd.rank() == 2:
    if how == "sleep":
        wait_for_release()
        hvd.allreduce(np.ones(3), name="second")
    elif how == "skip":
        wait_for_release()
    else:  # goes another way, and waits for the others there
        alone = hvd.allreduce(np.ones(3), name="another")  # the line that rank 2 is on
else:
    hvd.allreduce(np.ones(3), name="second")
