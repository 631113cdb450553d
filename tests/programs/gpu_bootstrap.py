"""Two ranks start the real NCCL, up to the first call that needs a GPU. Each rank prints the error of that call.

mpirun -n 2 python gpu_bootstrap.py <library>
"""

import sys
from functools import partial

import hvdlite
from hvdlite.comm.gpu import nccl
from hvdlite.errors import NcclError
from tests.support.fake_device import FakeDevice

hvdlite.init()
world = hvdlite.api.world()
world.devices.load = partial(nccl.load, sys.argv[1])
try:
    world.group().device_collectives(FakeDevice(world.topology.local_rank))
except NcclError as error:
    texts = hvdlite.allgather_object(str(error))  # the ranks can still communicate
    assert texts[0] == texts[1], texts
    print(f"rank {hvdlite.rank()} of {hvdlite.size()}: {error}", flush=True)
