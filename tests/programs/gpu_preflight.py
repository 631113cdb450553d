"""One rank loads NCCL, makes a communicator, sums out of place, and ends. Each step says its time, so a hang shows where."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import hvdlite
from hvdlite.api import world
from hvdlite.comm.gpu.nccl import DTYPES, OPS, in_words
from hvdlite.protocols import ReduceOp
from hvdlite_torch.tensors.device import current_device
from tests.gpu.card import take_card


@contextmanager
def step(name: str) -> Iterator[None]:
    print(f"{name} …", end=" ", flush=True)
    begin = time.perf_counter()
    yield
    print(f"{time.perf_counter() - begin:.3f} s", flush=True)


with step("init"):
    hvdlite.init()
    take_card()
with step("device"):
    device = current_device()
    print(device.place, device.identity, "of", device.visible, end=", ")
with step("load NCCL"):
    library = world().devices.load()
    if library is None:
        sys.exit("no NCCL was found: pip install nvidia-nccl-cu13, or HVDLITE_NCCL_LIBRARY=path")
    print(in_words(library.version), library.path, end=", ")
with step("unique id"):
    unique_id = library.unique_id()
stream = device.side()
with device.on(stream):
    with step("communicator"):
        communicator = library.connect(unique_id, 1, 0)
    x, out = device.empty([1000], "float32"), device.empty([1000], "float32")
    device.fill(x, 3.0)
    device.fill(out, 0.0)
    with step("sum of one rank, out of place"):
        where = device.pointer(x), device.pointer(out)
        communicator.all_reduce(*where, 1000, DTYPES["float32"], OPS[ReduceOp.SUM], stream.handle)
        stream.synchronize()
    assert (device.to_host(out) == 3.0).all()
    with step("error state"):
        assert communicator.error() is None
    with step("destroy"):
        communicator.destroy()
    with step("abort"):
        library.connect(library.unique_id(), 1, 0).abort()
print("all right", flush=True)
