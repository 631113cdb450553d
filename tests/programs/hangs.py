"""All ranks meet, once. Then rank 1 hangs in the way that the argument names, and the others come to their end."""

import atexit
import re
import sys
import threading
import time

import numpy as np

import hvdlite as hvd

how = sys.argv[1]


def hang() -> None:
    while True:
        time.sleep(0.01)  # the line that rank 1 is on


def hang_at_exit() -> None:
    if how == "in an exit handler" and is_rank_1:
        hang()


atexit.register(hang_at_exit)  # before hvdlite's own handler, so it runs after that, when all ranks have left
hvd.init()
hvd.allreduce(np.ones(3), name="last")
is_rank_1 = hvd.rank() == 1
if is_rank_1:
    if how in ("after the last exchange", "while others shut down"):
        hang()
    if how == "in a thread":
        threading.Thread(target=hang, name="the-one", daemon=False).start()
    if how == "in C code":
        re.fullmatch("(a+)+b", 60 * "a")  # it would take ages, and holds Python's lock
elif how == "while others shut down":
    hvd.shutdown()
