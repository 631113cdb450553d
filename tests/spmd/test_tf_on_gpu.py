"""TensorFlow's eager gradients on a pretended GPU: they are lent by DLPack, and no value is copied to host memory."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import hvdlite_tf as hvd
from hvdlite.adapter.buckets import DeviceBuckets, HostBuckets
from hvdlite.adapter.options import ExchangeOptions
from hvdlite.errors import DeviceError, HvdliteError, MismatchError
from hvdlite.tensors import device_registry
from hvdlite.tensors.compression import Compression
from hvdlite_tf.gradients import on_device
from hvdlite_tf.gradients.exchange import GradientExchange
from tests.conftest import UNDER_MPI
from tests.spmd.test_device_gradients import SHAPES, kinds_of_buckets, mean, on_gpu, values
from tests.support import fake_device

if not UNDER_MPI:
    # See test_keras_training.py.
    tf.config.threading.set_inter_op_parallelism_threads(8)


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(device_registry, "device_of", lambda array: fake_device._of_this_rank(torch.device("cpu")))


def variables(dtype: str = "float32") -> list[tf.Variable]:
    return [tf.Variable(tf.zeros(shape, dtype)) for shape in SHAPES.values()]


def own(rank: int, step: int = 0, dtype: str = "float32") -> list[Any]:
    return [tf.cast(tf.constant(x), dtype) for x in values(rank, step).values()]


def same(found: list[Any], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    for tensor, wanted in zip(found, expected.values(), strict=True):
        assert tensor.shape == np.shape(wanted)
        np.testing.assert_allclose(tf.cast(tensor + 0, "float64").numpy(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-12), ("float16", 2**-8), ("bfloat16", 2**-5)]
)
def test_weighted_averages(ranks: Any, dtype: str, tolerance: float) -> None:
    @on_gpu
    def check(gpu: Any) -> None:
        rank, size = hvd.rank(), hvd.size()
        exchange, sources, held = GradientExchange(ExchangeOptions()), variables(dtype), []
        for step in range(4):
            weights = [float(1 + r) for r in range(size)]
            expected = mean(weights, step) if size > 1 else values(0, step)
            found = exchange.combine(sources, own(rank, step, dtype), weights[rank])
            assert all(tensor.dtype == dtype for tensor in found)
            held.append((found, expected))
            for each in held:  # nobody overwrites what the program holds
                same(*each, tolerance)
            if size > 1:
                assert gpu.copies == [1]  # NCCL's first sum
        assert kinds_of_buckets() == ({DeviceBuckets} if size > 1 else set())

    ranks(check)


def test_gradients_that_some_ranks_lack(ranks: Any) -> None:
    @on_gpu
    def check(gpu: Any) -> None:
        rank, size = hvd.rank(), hvd.size()
        exchange, sources = GradientExchange(ExchangeOptions(op=hvd.Sum)), variables()
        for step in range(3):
            gradients: list[Any] = own(rank, step)
            gradients[0] = None
            if rank > 0:
                gradients[1] = None
            found = exchange.combine(sources, gradients)
            assert found[0] is None
            total = {name: sum(values(r, step)[name] for r in range(size)) for name in list(SHAPES)[1:]}
            same(found[1:], total | {"b": values(0, step)["b"]})
            nothing = [None] * len(sources) if rank == size - 1 else own(rank, step)
            found = exchange.combine(sources, nothing)
            if size > 1:
                same(found, {name: sum(values(r, step)[name] for r in range(size - 1)) for name in SHAPES})

    ranks(check)


def test_rows_beside_dense_gradients(ranks: Any) -> None:
    """Rank 0 has rows of the first table, the others its whole gradient: rows go through host memory, the rest does not."""

    @on_gpu
    def check(gpu: Any) -> None:
        rank, size = hvd.rank(), hvd.size()
        exchange, sources = GradientExchange(ExchangeOptions(op=hvd.Sum)), variables()
        for step in range(3):
            gradients: list[Any] = own(rank, step)
            if rank == 0:
                gradients[0] = tf.IndexedSlices(gradients[0], tf.range(5), tf.constant([5, 3]))
            found = exchange.combine(sources, gradients)
            total = {name: sum(values(r, step)[name] for r in range(size)) for name in SHAPES}
            same([tf.convert_to_tensor(found[0]), *found[1:]], total)

    ranks(check)


def test_a_tape_and_ranks_that_run_out_of_data(ranks: Any) -> None:
    @on_gpu
    def check(gpu: Any) -> None:
        rank, size = hvd.rank(), hvd.size()
        x = tf.Variable(np.arange(4.0))
        for step in range(2 + rank):
            with tf.GradientTape() as plain:
                y = tf.reduce_sum(x * float(rank + 1))
            tape = hvd.DistributedGradientTape(plain)
            there = [r + 1 for r in range(size) if step < 2 + r]
            found = tape.gradient(y, x)
            np.testing.assert_allclose(found.numpy(), np.full(4, sum(there) / len(there)))
        assert hvd.join() == size - 1
        assert kinds_of_buckets() == ({DeviceBuckets} if size > 1 else set())
        assert gpu.copies == [1] * (size > 1)  # NCCL's first sum

    ranks(check)


def test_keras_steps_that_are_not_traced(ranks: Any) -> None:
    @on_gpu
    def check(gpu: Any) -> None:
        rank, size = hvd.rank(), hvd.size()
        variable = keras.Variable(np.zeros(3), dtype="float32")
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        for _ in range(3):
            optimizer.apply([tf.constant([1.0, 2.0, 3.0]) * (rank + 1)], [variable])
        np.testing.assert_allclose(variable.numpy(), -3 * np.array([1.0, 2.0, 3.0]) * (size + 1) / 2, rtol=1e-6)
        assert kinds_of_buckets() == ({DeviceBuckets} if size > 1 else set())

    ranks(check)


def test_errors_and_compression(ranks: Any) -> None:
    @on_gpu
    def check(gpu: Any) -> None:
        rank, size = hvd.rank(), hvd.size()
        exchange, sources = GradientExchange(ExchangeOptions(compression=Compression.fp16)), variables()
        for step in range(2):
            if size > 1:
                with pytest.raises(HvdliteError, match="add up to 0"):
                    exchange.combine(sources, own(rank, step), 0)
            same(exchange.combine(sources, own(rank, step)), mean([1.0] * size, step), 2**-8)

    ranks(check)


def test_in_a_graph_they_go_through_host_memory(ranks: Any) -> None:
    @on_gpu
    def check(gpu: Any) -> None:
        rank, size = hvd.rank(), hvd.size()
        exchange, sources = GradientExchange(ExchangeOptions()), variables()
        step = tf.function(lambda *gradients: exchange.combine(sources, gradients), autograph=False)
        same(step(*own(rank)), mean([1.0] * size))
        assert kinds_of_buckets() == ({HostBuckets} if size > 1 else set())

    ranks(check)


def test_without_a_library_that_can_use_the_gpu(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> Any:
        raise DeviceError("torch was built for the CPU only")

    monkeypatch.setattr(device_registry, "device_of", fail)

    @on_gpu
    def check(gpu: Any) -> None:
        rank, size = hvd.rank(), hvd.size()
        found = GradientExchange(ExchangeOptions()).combine(variables(), own(rank))
        same(found, mean([1.0] * size))
        assert kinds_of_buckets() == ({HostBuckets} if size > 1 else set())

    ranks(check)


def test_ranks_that_go_different_ways(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "is_on_gpu", lambda tensor: hvd.rank() == 0)

    @on_gpu
    def check(gpu: Any) -> None:
        if hvd.size() > 1:
            with pytest.raises(MismatchError, match="device=cuda"):
                GradientExchange(ExchangeOptions()).combine(variables(), own(hvd.rank()))

    ranks(check)
