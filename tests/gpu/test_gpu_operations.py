"""Named operations on a real GPU: `pytest -m gpu`. All else is tested without one, by tests/support/fake_device.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hvdlite
import hvdlite_torch as hvd
from hvdlite.comm.gpu import nccl
from hvdlite.comm.gpu.nccl_collectives import NcclCollectives
from hvdlite.protocols import Device
from hvdlite.tensors.cupy_device import CupyDevice
from hvdlite.tensors.reduction import reduction
from hvdlite.testing import on_ranks
from hvdlite_torch.tensors.device import TorchDevice
from tests.gpu.card import CARD, NO_CARD, STAND_IN
from tests.support.fake_device import FakeDevice, fake_gpu
from tests.support.fake_nccl import FakeNccl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NO_CARD is not None, reason=str(NO_CARD)),
    pytest.mark.filterwarnings("default"),  # of JAX and CuPy, which differ from machine to machine
]


def devices() -> list[Any]:
    return ["stand-in"] if STAND_IN else ["torch", "cupy"]


def host(array: Any) -> Any:
    """An array of JAX or CuPy as NumPy's."""
    return np.asarray(array.get() if hasattr(array, "get") else array)


def make_device(library: str) -> Device:
    if library == "cupy":
        pytest.importorskip("cupy")
        return CupyDevice(0)
    if library == "stand-in":
        return FakeDevice(0)
    return TorchDevice(torch.device("cuda", 0))


@pytest.fixture(scope="module")
def library() -> nccl.Library:
    found = FakeNccl() if STAND_IN else nccl.load()
    assert found is not None, "there is a GPU and no NCCL: pip install nvidia-nccl-cu13"
    return found


@pytest.mark.parametrize("kind", devices())
def test_nccl_of_one_rank(library: nccl.Library, kind: str) -> None:
    """Every call of the library, with the real one: sums of one rank are what it has."""
    device = make_device(kind)
    stream = device.side()
    with device.on(stream):
        communicator = library.connect(library.unique_id(), 1, 0)
        channel = NcclCollectives(device, 0, 1, communicator, library.version)
        for dtype in ("float32", "float16", "float64", "int64", "uint8", "complex64"):
            values = np.arange(1, 9).astype(dtype)
            x, out = device.empty([8], dtype), device.empty([8], dtype)
            device.from_host(values, x)
            for op in (hvdlite.Sum, hvdlite.Min, hvdlite.Max, hvdlite.Product):
                how = reduction(dtype, op)
                if how.on_device(library.version) is None or how.casts_on_device:
                    continue
                device.fill(out, 0)
                channel.allreduce(x, op, stream, out)
                np.testing.assert_array_equal(device.to_host(out), values)
            calls: tuple[Callable[[Any, Any], None], ...] = (
                lambda x, out: channel.reduce_scatter(x, out, [8], hvdlite.Sum, stream),
                lambda x, out: channel.allgather(x, out, [8], stream),
                lambda x, out: channel.alltoall(x, [8], out, [8], stream),
            )
            for call in calls:
                device.fill(out, 0)
                call(x, out)
                np.testing.assert_array_equal(device.to_host(out), values)
            channel.broadcast(x, 0, stream)
            np.testing.assert_array_equal(device.to_host(x), values)
        channel.check()
        channel.close()


@pytest.mark.parametrize("kind", devices())
def test_arithmetic_of_devices(kind: str) -> None:
    device = make_device(kind)
    stream = device.side()
    with device.on(stream):
        parts = [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(4, np.float32)]
        tensors = [device.empty(part.shape, "float32") for part in parts]
        for part, tensor in zip(parts, tensors, strict=True):
            device.from_host(part.reshape(-1), device.flat(tensor))
        flat = device.empty([10], "float32")
        device.pack(tensors, flat)
        device.scale(flat, 3.0)
        device.divide(flat, 2)
        device.unpack(flat, tensors)
        for part, tensor in zip(parts, tensors, strict=True):
            np.testing.assert_allclose(device.to_host(device.flat(tensor)).reshape(part.shape), part * 1.5)
        whole = device.cast(flat, "int64")
        device.fill(whole, -7)
        device.divide(whole, 2)
        assert device.to_host(whole).tolist() == [-3] * 10  # toward zero
        assert device.count(device.view(flat, "uint8")) == 40
        device.keep(flat, stream)
    assert device.identity and device.visible >= 1
    if len(device.identity) == 36 and not STAND_IN:  # CuPy cuts off one that has a zero byte
        assert device.identity == TorchDevice(torch.device("cuda", 0)).identity


def test_one_rank_alone() -> None:
    def check() -> None:
        with fake_gpu(index=0) if STAND_IN else contextlib.nullcontext():
            x = torch.arange(4.0, device=CARD)
            result = hvd.allreduce(x)
            assert result.tolist() == x.tolist() and result.device == x.device
            assert hvd.allgather(x).tolist() == x.tolist()
            assert hvd.broadcast(x, 0).tolist() == x.tolist()

    on_ranks(1, check)


@pytest.mark.skipif(STAND_IN, reason="the stand-in has torch's tensors only")
@pytest.mark.parametrize("name", ["jax", "cupy"])
def test_arrays_by_dlpack(name: str) -> None:
    module = pytest.importorskip("jax.numpy" if name == "jax" else "cupy")

    def check() -> None:
        x = module.arange(6, dtype=module.float32).reshape(2, 3)
        for result in (hvdlite.allreduce(x, hvdlite.Sum), hvdlite.allgather(x), hvdlite.broadcast(x, 0)):
            assert type(result) is type(x) and result.shape == (2, 3)
            np.testing.assert_array_equal(host(result), np.arange(6).reshape(2, 3))
        handles = [hvdlite.allreduce_async(x + n, hvdlite.Sum, f"n{n}") for n in range(5)]
        for n, handle in enumerate(handles):
            np.testing.assert_array_equal(host(module.sum(handle.wait())), 15 + 6 * n)

    on_ranks(1, check)
