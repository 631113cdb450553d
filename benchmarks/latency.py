"""Blocking allreduce: what hvdlite's road for named operations costs, next to its peers in the same run.

    hvdliterun -np 2 python -m benchmarks.latency

Measures one blocking, in-place float32 sum at a time, by size: hvdlite, MPI's own Allreduce through mpi4py, torch's gloo
backend, and Horovod where it can be imported. The peers take turns within each round; each call starts when all ranks are
there. Results are checked against the true sum. Times are wall-clock microseconds on rank 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed
from mpi4py import MPI

import hvdlite as hvd

Call = Callable[[np.ndarray], object]


def peers() -> dict[str, Call]:
    """The competitors: each sums an array over the ranks, in place."""
    comm = MPI.COMM_WORLD
    found: dict[str, Call] = {
        "hvdlite": lambda x: hvd.allreduce(x, hvd.Sum, inplace=True),
        "MPI": lambda x: comm.Allreduce(MPI.IN_PLACE, x, MPI.SUM),
    }
    address = None
    if hvd.rank() == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
    host, port = hvd.broadcast_object(address)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", f"tcp://{host}:{port}", rank=hvd.rank(), world_size=hvd.size())
    found["torch gloo"] = lambda x: torch.distributed.all_reduce(torch.from_numpy(x))
    if importlib.util.find_spec("horovod"):
        import horovod.torch as horovod

        horovod.init()
        found["Horovod"] = lambda x: horovod.allreduce_(torch.from_numpy(x), op=horovod.Sum)
    return found


def measure(calls: dict[str, Call], elements: int, rounds: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each call by peer, `repeats` in a row in each of `rounds` rounds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    x = np.empty(elements, np.float32)
    for _ in range(rounds):
        for name, call in calls.items():
            for repeat in range(repeats + 2):
                x.fill(hvd.rank() + 1)
                MPI.COMM_WORLD.Barrier()
                start = time.perf_counter()
                call(x)
                elapsed = time.perf_counter() - start
                if repeat >= 2:  # the first ones warm up
                    times[name].append(elapsed)
            expected = hvd.size() * (hvd.size() + 1) / 2
            assert (x == expected).all(), f"{name}: expected {expected} everywhere; got {x[:4]}"
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 4096, 65536, 2**20, 2**24], help="bytes")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()

    hvd.init()
    calls = peers()
    if hvd.rank() == 0:
        missing = "" if "Horovod" in calls else "; Horovod cannot be imported here"
        print(f"{hvd.size()} ranks, {os.cpu_count()} cores, {MPI.Get_library_version().split(',')[0]}{missing}")
        print("median (minimum) in µs, ratio of medians to MPI's own")
        print(f"{'bytes':>10}" + "".join(f"{name:>30}" for name in calls))
    figures = {}
    for nbytes in arguments.sizes:
        repeats = max(3, min(200, 2**22 // nbytes))
        times = measure(calls, max(1, nbytes // 4), arguments.rounds, repeats)
        figures[nbytes] = {n: {"median": statistics.median(t), "minimum": min(t)} for n, t in times.items()}
        if hvd.rank() == 0:
            own = figures[nbytes]["MPI"]["median"]
            cells = [
                f"{1e6 * f['median']:.1f} ({1e6 * f['minimum']:.1f})  {f['median'] / own:.2f}"
                for f in figures[nbytes].values()
            ]
            print(f"{nbytes:>10}" + "".join(f"{cell:>30}" for cell in cells))
            sys.stdout.flush()
    if hvd.rank() == 0 and arguments.json:
        arguments.json.write_text(json.dumps({"ranks": hvd.size(), "seconds": figures}, indent=2))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
