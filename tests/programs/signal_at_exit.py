"""Rank 0 has reached its end and waits for rank 1. Then a signal handler of rank 0 runs and raises an exception."""

import os
import signal

import hvdlite as hvd


def handler(*_: object) -> None:
    raise TimeoutError


hvd.init()
signal.signal(signal.SIGALRM, handler)
pids = hvd.allgather_object(os.getpid())
if hvd.rank() == 1:
    try:
        hvd.barrier()
    except hvd.PeerLeftError:
        os.kill(pids[0], signal.SIGALRM)
        print("rank 0 was told", flush=True)
