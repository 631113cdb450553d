"""Rank 0 has come to its end, and waits for rank 1's; then its signal handler is called, which raises."""

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
