"""Rank 1 sends one message and leaves. Rank 0 receives messages until no rank is left that could send one."""

from __future__ import annotations

import numpy as np

import hvdlite as hvd
from hvdlite.api import world
from hvdlite.errors import PeerLeftError
from hvdlite.protocols import WaitKind

hvd.init()
here = world()
channel = here.group().channel("questions")
if hvd.rank():
    channel.isend(np.array([4.0]), 0).wait()
else:
    got, served = np.zeros(1), []
    try:
        with channel.guarded("the next question", WaitKind.SERVICE):
            while True:
                channel.irecv(got).wait()
                served.append(float(got[0]))
    except PeerLeftError as error:
        print(f"served {served}; {error}")
