"""Every rank compares its ranks and sizes in the environment with those in the job."""

import os
import socket

from horovod.common.basics import HorovodBasics

basics = HorovodBasics(__file__, "mpi_lib")
basics.init()
for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
    seen, expected = os.environ[f"HOROVOD_{name.upper()}"], str(getattr(basics, name)())
    assert seen == expected, f"{name}: {seen} in the environment, {expected} in the job"
assert os.environ["HOROVOD_HOSTNAME"] == socket.gethostname()
print("agree", basics.rank(), socket.gethostname(), flush=True)
basics.shutdown()
