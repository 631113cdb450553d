"""`hvdlite.DistributedGradient` and Keras' exchange of arrays that lie on a pretended GPU: they stay there.

The arrays are torch's, which `tests.support.fake_device` takes for a GPU's. NumPy arrays are in host memory as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hvdlite as hvd
import hvdlite.gradients.device.announced
from hvdlite.adapter.buckets import DeviceBuckets, HostBuckets
from hvdlite.adapter.eager_sync import EagerSync
from hvdlite.adapter.options import ExchangeOptions
from hvdlite.api import world
from hvdlite.errors import DeviceError, HvdliteError, MismatchError
from hvdlite.gradients.planner import plan_buckets
from hvdlite.tensors.compression import Compression
from tests.support.fake_device import FakeDevice, fake_gpu

SHAPES = {"w": (5, 3), "b": (3,), "scale": (), "empty": (0, 4), "deep": (2, 3, 4)}


@pytest.fixture(autouse=True)
def several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(order: Any, nbytes: Any, bucket_bytes: int) -> Any:
        return plan_buckets(order, nbytes, 64)

    monkeypatch.setattr(hvdlite.gradients.device.announced, "plan_buckets", plan)


def on_gpu(check: Callable[..., Any]) -> Callable[..., Any]:
    """What a rank does, with a GPU whose tensors nobody copies to host memory."""

    @functools.wraps(check)
    def with_gpu(*args: Any) -> Any:
        group = world().group()
        # Under mpirun the world is that of earlier tests, whose memory would be found again.
        for each in list(group.exchanges):
            group.remove(each)
        with fake_gpu() as gpu:
            copies: list[int] = []
            plain = gpu.to_host

            def to_host(tensor: Any) -> Any:
                copies.append(tensor.numel())
                return plain(tensor)

            gpu.to_host = to_host  # type: ignore[method-assign]
            gpu.copies = copies  # type: ignore[attr-defined]
            try:
                return check(gpu, *args)
            finally:
                for each in list(group.exchanges):  # their GPU goes
                    group.remove(each)

    return with_gpu


def values(rank: int, step: int = 0) -> dict[str, np.ndarray]:
    """Small whole numbers over 4: exact in every dtype, and so are their sums."""
    random = np.random.default_rng([rank, step])
    return {name: random.integers(-8, 9, shape) / 4 for name, shape in SHAPES.items()}


def own(gpu: FakeDevice, rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: gpu.ready(torch.from_numpy(np.asarray(x)).to(dtype)) for name, x in values(rank, step).items()}


def mean(weights: list[float], step: int = 0) -> dict[str, np.ndarray]:
    return {
        name: sum(values(rank, step)[name] * weight for rank, weight in enumerate(weights)) / sum(weights)
        for name in SHAPES
    }


def same(gpu: FakeDevice, found: dict[str, Any], expected: dict[str, np.ndarray], tolerance: float = 1e-6) -> None:
    for name, wanted in expected.items():
        gpu.use(found[name])  # by the current stream
        assert found[name].shape == wanted.shape
        np.testing.assert_allclose(found[name].double().numpy(), wanted, rtol=tolerance, atol=tolerance)


def stayed(gpu: Any) -> bool:
    """Whether nothing was copied to host memory but, of each new communicator, one number: that of NCCL's first sum."""
    made = sum(isinstance(each, DeviceBuckets) for each in world().group().exchanges)
    return gpu.copies == [1] * made and gpu.host_waits == made


def kinds_of_buckets() -> set[type]:
    return {type(each) for each in world().group().exchanges if isinstance(each, DeviceBuckets | HostBuckets)}


@pytest.mark.parametrize("inplace", [False, True], ids=["new", "inplace"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.float64, 1e-12), (torch.float16, 2**-9), (torch.bfloat16, 2**-6)],
)
def test_averages_and_sums(ranks: Any, dtype: torch.dtype, tolerance: float, inplace: bool) -> None:
    @on_gpu
    def check(gpu: Any) -> None:
        rank, size = hvd.rank(), hvd.size()
        for op in (hvd.Average, hvd.Sum):
            combine = hvd.DistributedGradient(op, inplace=inplace)
            held = []
            for step in range(4):
                given = own(gpu, rank, step, dtype)
                before = {name: x.clone() for name, x in given.items()}
                found = combine(given)
                factor = 1 if op is hvd.Average else size
                expected = {name: x * factor for name, x in mean([1.0] * size, step).items()}
                same(gpu, found, expected, tolerance * (2 if size > 1 else 1))
                assert all((found[name] is given[name]) == (inplace or size == 1) for name in SHAPES)
                if not inplace:
                    assert all(torch.equal(given[name], before[name]) for name in SHAPES)
                held.append((found, expected))
            for found, expected in held:  # nobody has overwritten what the program holds
                same(gpu, found, expected, tolerance * (2 if size > 1 else 1))
        assert stayed(gpu)
        assert kinds_of_buckets() == ({DeviceBuckets} if size > 1 else set())
        gpu.check_kept()

    ranks(check)


@pytest.mark.parametrize("shares", ["uneven", "one has all"])
def test_weighted(ranks: Any, shares: str) -> None:
    @on_gpu
    def check(gpu: Any) -> None:
        rank, size = hvd.rank(), hvd.size()
        weights = [float(1 + r if shares == "uneven" else r == 0) for r in range(size)]
        combine = hvd.DistributedGradient()
        for step in range(3):
            given: Any = own(gpu, rank, step)
            if weights[rank] == 0:  # it may be anything
                given = {name: x.fill_(torch.nan) for name, x in given.items()}
            same(gpu, combine(given, weight=weights[rank]), mean(weights, step) if size > 1 else values(0, step))
        assert stayed(gpu)

    ranks(check)


def test_gradients_that_some_ranks_lack(ranks: Any) -> None:
    @on_gpu
    def check(gpu: Any) -> None:
        rank, size = hvd.rank(), hvd.size()
        combine = hvd.DistributedGradient(hvd.Sum)
        for step in range(3):
            given: Any = own(gpu, rank, step)
            given["b"] = None if rank > 0 else given["b"]
            given["w"] = None
            found = combine(given)
            assert found["w"] is None
            expected = {name: sum(values(r, step)[name] for r in range(size)) for name in ("scale", "deep")}
            same(gpu, found, expected | {"b": values(0, step)["b"]})
        assert stayed(gpu)

    ranks(check)


def test_a_rank_without_any_gradient_gets_arrays(ranks: Any) -> None:
    @on_gpu
    def check(gpu: Any) -> None:
        rank, size = hvd.rank(), hvd.size()
        combine = hvd.DistributedGradient()
        for step in range(2):
            nothing = size > 1 and rank == size - 1
            found = combine(dict.fromkeys(SHAPES) if nothing else own(gpu, rank, step), weight=0 if nothing else 1)
            expected = mean([1.0] * max(1, size - 1), step)
            if nothing:
                for name, wanted in expected.items():
                    assert isinstance(found[name], np.ndarray)
                    np.testing.assert_allclose(found[name], wanted, rtol=1e-6)
            else:
                same(gpu, found, expected)
                assert stayed(gpu)

    ranks(check)


def test_compressed(ranks: Any) -> None:
    @on_gpu
    def check(gpu: Any) -> None:
        size = hvd.size()
        combine = hvd.DistributedGradient(compression=Compression.fp16)
        found = combine(own(gpu, hvd.rank()))
        same(gpu, found, mean([1.0] * size), 2**-8)
        assert all(x.dtype is torch.float32 for x in found.values()) and stayed(gpu)

    ranks(check)


@pytest.mark.parametrize("known", [True, False], ids=["known", "late"])
def test_ranks_that_run_out_of_data(ranks: Any, known: bool) -> None:
    """Rank r makes 2 + r steps; and of a layout that not all have seen, if it is not known."""

    @on_gpu
    def check(gpu: Any) -> None:
        rank, size = hvd.rank(), hvd.size()
        combine, other = hvd.DistributedGradient(), hvd.DistributedGradient()
        for step in range(2 + rank):
            there = [float(step < 2 + r) for r in range(size)]
            same(gpu, combine(own(gpu, rank, step), weight=1), mean(there, step))
            if step >= (0 if known else 2):
                few = {"b": own(gpu, rank, step)["b"]}
                found = other(few)
                np.testing.assert_allclose(found["b"].numpy(), mean(there, step)["b"], rtol=1e-6)
        assert hvd.join() == size - 1
        same(gpu, combine(own(gpu, rank, 9)), mean([1.0] * size, 9))  # and again, in step
        found = other({"b": own(gpu, rank, 9)["b"]})
        np.testing.assert_allclose(found["b"].numpy(), mean([1.0] * size, 9)["b"], rtol=1e-6)
        assert stayed(gpu)

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_errors_are_those_of_all_ranks(ranks: Any) -> None:
    @on_gpu
    def check(gpu: Any) -> None:
        rank, size = hvd.rank(), hvd.size()
        combine = hvd.DistributedGradient()
        for _ in range(2):
            with pytest.raises(HvdliteError, match="add up to 0"):
                combine(own(gpu, rank), weight=0)
            same(gpu, combine(own(gpu, rank)), mean([1.0] * size))
            with pytest.raises(MismatchError, match=r"different gradients at \['b'\]"):
                combine(own(gpu, rank) | {"b": torch.zeros(3 + (rank == 1))})
            same(gpu, combine(own(gpu, rank)), mean([1.0] * size))

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_no_room_on_one_rank(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @on_gpu
    def check(gpu: Any) -> None:
        rank, size = hvd.rank(), hvd.size()
        combine = hvd.DistributedGradient()
        gpu.capacity = 8 if rank == 0 else None
        with pytest.raises(DeviceError, match=r"(?s)cannot take part.*rank 0: OutOfMemoryError: CUDA out of memory"):
            combine(own(gpu, rank))
        gpu.capacity = None
        same(gpu, combine(own(gpu, rank)), mean([1.0] * size))

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_arrays_in_host_memory_beside(ranks: Any) -> None:
    """All gradients of all ranks lie on the GPU, or all travel through host memory; and that may change."""

    @on_gpu
    def check(gpu: Any) -> None:
        rank, size = hvd.rank(), hvd.size()
        combine = hvd.DistributedGradient()
        for step, host in enumerate(["none", "rank 0", "rank 0", "none", "one array", "all", "all"]):
            given: Any = own(gpu, rank, step)
            if host == "all" or (host == "rank 0" and rank == 0):
                given = {name: x.numpy() for name, x in given.items()}
            elif host == "one array":
                given["w"] = given["w"].numpy()
            found = combine(given)
            for name, wanted in mean([1.0] * size, step).items():
                assert type(found[name]) is type(given[name])
                np.testing.assert_allclose(np.asarray(found[name]), wanted, rtol=1e-6)
        assert kinds_of_buckets() == {DeviceBuckets, HostBuckets}

    ranks(check)


def test_the_gradients_of_keras_on_torch(ranks: Any) -> None:
    @on_gpu
    def check(gpu: Any) -> None:
        rank, size = hvd.rank(), hvd.size()
        sources = list(own(gpu, 7).values())
        exchange = EagerSync(ExchangeOptions())
        for step in range(3):
            gradients: Any = list(own(gpu, rank, step).values())
            weights = [float(1 + r) for r in range(size)]
            found = exchange.combine(sources, gradients, weights[rank])
            same(gpu, dict(zip(SHAPES, found, strict=True)), mean(weights, step) if size > 1 else values(0, step))
            gradients[0] = None if rank == 0 else gradients[0]
            found = exchange.combine(sources, gradients)
            if size > 1:
                expected = sum(values(r, step)["w"] for r in range(1, size)) / size
                np.testing.assert_allclose(found[0].numpy(), expected, rtol=1e-6)
        assert kinds_of_buckets() == ({DeviceBuckets} if size > 1 else set())

    ranks(check)
