"""Several ranks exchange arrays of JAX or CuPy that lie on one GPU, and compare with NumPy. Each rank prints "all right".

mpirun -n 2 python gpu_arrays.py jax|cupy|torch
"""

import importlib
import sys
from typing import Any

import numpy as np

import hvdlite
from hvdlite.api import world
from tests.gpu.card import take_card

hvdlite.init()
rank, size, library = hvdlite.rank(), hvdlite.size(), sys.argv[1]
gpu = take_card(rank)
module: Any = importlib.import_module({"jax": "jax.numpy"}.get(library, library))
here = {"device": gpu} if library == "torch" else {}


def make(rows: int, start: int = 0) -> Any:
    return module.reshape(module.arange(start, start + 3 * rows, dtype=module.float32, **here), (rows, 3))


def host(array: Any) -> np.ndarray:
    return np.asarray(array.get() if library == "cupy" else array)


def matrix(rows: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + 3 * rows, dtype=np.float32).reshape(rows, 3)


def check(found: Any, expected: np.ndarray, what: str) -> None:
    assert type(found) is type(make(1)), f"{what}: {type(found)}"
    np.testing.assert_array_equal(host(found), expected, what)


for op, function in ((hvdlite.Sum, np.add), (hvdlite.Max, np.maximum)):
    expected = function.reduce([matrix(2, r) for r in range(size)])
    check(hvdlite.allreduce(make(2, rank), op), expected, f"allreduce, {op}")
check(hvdlite.allgather(make(rank + 1)), np.concatenate([matrix(r + 1) for r in range(size)]), "allgather")
check(hvdlite.broadcast(make(2, rank), size - 1), matrix(2, size - 1), "broadcast")
handles = [hvdlite.allreduce_async(make(2, n + rank), hvdlite.Sum, name=f"n{n}") for n in range(5)]
for n, handle in enumerate(handles):  # the result is read at once by the library's own stream
    total = module.sum(handle.wait())
    assert float(total) == sum(matrix(2, n + r).sum() for r in range(size)), f"sum of n{n}"

combine = hvdlite.DistributedGradient()
for step in range(6):
    gradients = {"w": make(4, step + rank), "b": make(1, rank), "big": make(100_000, step)}
    found = combine(gradients, weight=rank + 1.0)
    whole = sum(range(1, size + 1))
    for name, rows, starts in (("w", 4, [step + r for r in range(size)]), ("b", 1, range(size))):
        mean = sum(matrix(rows, start) * (r + 1) for r, start in enumerate(starts)) / whole
        np.testing.assert_allclose(host(found[name]), mean, rtol=1e-6, err_msg=f"{name} in step {step}")
    np.testing.assert_allclose(host(found["big"]), matrix(100_000, step), rtol=1e-6)
    assert type(found["w"]) is type(gradients["w"])
assert world().devices.in_use, "the arrays went through host memory"
print("all right", flush=True)
hvdlite.shutdown()
