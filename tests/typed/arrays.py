"""Programs with arrays of NumPy, and what needs no framework."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import hvdlite
import hvdlite.checkpoint
import hvdlite.elastic
import hvdlite.errors
from hvdlite.protocols import TensorInfo
from hvdlite.tensors.numpy_adapter import NumpyAdapter
from hvdlite.testing import LocalFabric, LocalTransport, Network, on_ranks

Floats = npt.NDArray[np.float64]


def exchange() -> list[float]:
    """Operations and their handles."""
    x: Floats = np.ones((hvdlite.size(), 1))
    assert_type(hvdlite.allreduce(x), Floats)
    assert_type(hvdlite.allreduce_async(x, hvdlite.Sum).wait(), Floats)
    assert_type(hvdlite.allgather(x), Floats)
    assert_type(hvdlite.allgather_async(x), hvdlite.Handle[Floats])
    assert_type(hvdlite.broadcast(x, 0), Floats)
    assert_type(hvdlite.broadcast_async(x, 0), hvdlite.Handle[Floats])
    assert_type(hvdlite.reducescatter(x), Floats)
    assert_type(hvdlite.reducescatter_async(x), hvdlite.Handle[Floats])
    assert_type(hvdlite.alltoall(x), Floats)
    rows, counts = hvdlite.alltoall(x, [1] * hvdlite.size())
    assert_type(rows, Floats)
    assert_type(hvdlite.alltoall_async(x).wait(), Floats)
    assert_type(hvdlite.allgather_object("a"), list[str])
    assert_type(hvdlite.allgather_object_async("a"), hvdlite.Handle[list[str]])
    assert_type(hvdlite.broadcast_object({"epoch": 1}), dict[str, int])
    assert_type(hvdlite.broadcast_object_async("a", 0), hvdlite.Handle[str])
    hvdlite.barrier()
    assert_type(hvdlite.join(), int)
    combine = hvdlite.DistributedGradient(hvdlite.Sum)
    gradients = combine({"w": x})
    assert_type(gradients, dict[str, Floats])
    return [float(gradients["w"].sum()), float(counts.sum()), float(rows.sum())]


class Column:
    """An array of a user's own."""

    def __init__(self, values: Floats) -> None:
        self.values = values


class ColumnAdapter(NumpyAdapter):
    """What reads and makes such arrays."""

    def info(self, tensor: Any) -> TensorInfo:
        """Dtype and shape."""
        return super().info(tensor.values)

    def to_array(self, tensor: Any, *, wide: bool) -> Any:
        """The values."""
        return super().to_array(tensor.values, wide=wide)

    def from_array(self, array: Any, dtype: str, like: Any) -> Any:
        """A new one."""
        return Column(super().from_array(array, dtype, like.values))


hvdlite.register_adapter(Column, ColumnAdapter())


def columns() -> list[float]:
    """Operations on such arrays."""
    total = hvdlite.allreduce(Column(np.ones(2)), hvdlite.Sum)
    assert_type(total, Column)
    found: list[float] = total.values.tolist()
    return found


def saved(folder: Path) -> int:
    """A checkpoint, and the start from it."""
    weights = np.ones(3)
    path = hvdlite.checkpoint.save(folder, weights=weights, epoch=2)
    assert_type(path, Path)
    assert_type(hvdlite.checkpoint.save(folder, weights=weights, epoch=2, wait=False), Path)
    hvdlite.checkpoint.wait()
    loaded = hvdlite.checkpoint.load(folder)
    assert_type(loaded, hvdlite.checkpoint.Loaded | None)
    assert loaded is not None
    epoch: int = loaded["epoch"]
    return epoch


def elastic() -> int:
    """A training that goes on when ranks come and go."""

    @hvdlite.elastic.run
    def train(state: hvdlite.elastic.ObjectState, epochs: int) -> int:
        while state.epoch < epochs:
            state.epoch += 1
            state.commit()
        epoch: int = state.epoch
        return epoch

    state = hvdlite.elastic.ObjectState(epoch=0)
    base: hvdlite.elastic.State = state
    base.register_reset_callbacks([lambda: print("ranks came or went")])
    try:
        return train(state, epochs=3)
    except hvdlite.elastic.HostsUpdatedInterrupt as change:
        assert_type(change.skip_sync, bool)
        return int(hvdlite.elastic.HostUpdateResult.no_update)
    except (hvdlite.elastic.HorovodInternalError, hvdlite.elastic.CommitError):
        return -1


def double(x: Any) -> Any:
    """A function that can be served."""
    return 2 * x


def predict_with() -> Any:
    """Functions that can be served."""

    @hvdlite.servable(dtype="float32", shape=(2,))
    def doubled(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return 2 * x

    hvdlite.servable(double)
    return doubled(np.ones((1, 2), np.float32))


def serve() -> None:
    """A server, which runs until it is stopped."""
    hvdlite.serve(double, port=8000)


def start() -> list[int]:
    """Ranks that a notebook starts."""
    found = hvdlite.run(hvdlite.rank, np=2)
    assert_type(found, list[int])
    return found


def without_mpi() -> list[int]:
    """Ranks as threads."""
    network = Network(latency=1e-3, bandwidth=1e9)

    def number(transport: LocalTransport) -> int:
        return transport.rank

    assert_type(LocalFabric(2, network=network).run(number), list[int])
    found = on_ranks(2, hvdlite.rank)
    assert_type(found, list[int])
    return found


def texts(errors: Sequence[Exception]) -> list[str]:
    """The errors that are not in every package."""
    mine = (
        hvdlite.errors.CommitError,
        hvdlite.errors.DeviceError,
        hvdlite.errors.DistributedAlreadyError,
        hvdlite.errors.MissingPackageError,
        hvdlite.errors.NcclError,
    )
    return [str(error) for error in errors if isinstance(error, mine)]
