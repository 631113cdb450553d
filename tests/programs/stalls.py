"""Rank 2 does not participate in the second operation. The first argument says what rank 2 does instead.

If rank 2 sleeps, it goes on when the file that the second argument names exists.
"""

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
    else:  # waits for the others in another operation
        alone = hvd.allreduce(np.ones(3), name="another")  # the line that rank 2 is on
else:
    hvd.allreduce(np.ones(3), name="second")
